"""Start of an attempt: the one function that the control plane has run as a Ray task."""

from __future__ import annotations

import ray

from worker.actors.supervisor import Supervisor
from worker.contract.actors import NAMESPACE, supervisor_name
from worker.contract.messages import AttemptStart

__all__ = ["start_supervisor"]

_HEAD = "node:__internal_head__"
"""A resource that Ray gives to the node of its head."""


def start_supervisor(attempt_json: str) -> None:
    """Make the named detached supervisor of an attempt and start it; one that exists is left as it is.

    Args:
        attempt_json: an :class:`AttemptStart` as JSON.
    """
    attempt = AttemptStart.model_validate_json(attempt_json)
    # Beside the head where that takes part: then no death of another node takes the one that can tell of it along.
    beside = {_HEAD: 0.001} if _HEAD in ray.cluster_resources() else {}
    actor = ray.remote(Supervisor).options(
        name=supervisor_name(attempt.job_id, attempt.attempt),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_concurrency=32,
        max_restarts=0,
        num_cpus=0,
        resources=beside,
    )
    ray.get(actor.remote().start.remote(attempt_json))
