"""Decisions of the reconciler. Pure: values in, a decision out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.launcher_api import Capacity, Resources
from worker.contract.errors import FieldError
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = [
    "STARVATION_S", "STOP_AGAIN_S", "Admission", "AttemptAction", "AttemptView", "End", "Waiting", "decide_admissions",
    "decide_attempt", "decide_end", "demand_of",
]  # fmt: skip

STARVATION_S = 300.0
"""A job that waited this long is passed by no other."""
STOP_AGAIN_S = 5.0
"""Pause between two requests to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job in the queue."""

    job_id: str
    worker: Resources
    """What one worker needs."""
    workers: int
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What becomes of a waiting job: it starts, can never start (``errors``), or waits for ``message``."""

    job_id: str
    start: bool = False
    errors: tuple[FieldError, ...] = ()
    message: str = ""


def demand_of(spec: JobSpec) -> Resources:
    """Return what one worker of a job needs."""
    need = spec.resources
    return Resources(need.cpus_per_worker, need.gpus_per_worker, float(need.memory_bytes_per_worker or 0))


def decide_admissions(waiting: Sequence[Waiting], capacity: Capacity, reserved: Resources) -> list[Admission]:
    """Admit whole gangs, oldest first; a smaller job may pass one that does not fit, until that one has starved.

    Args:
        waiting: the queue, oldest first.
        capacity: what the cluster has.
        reserved: promised to jobs that have started and do not hold it yet.
    """
    free, blocked_by, decisions = capacity.free - reserved, "", []
    for job in waiting:
        impossible = _impossible(job, capacity)
        asked = job.worker.times(job.workers)
        if impossible:
            decisions.append(Admission(job_id=job.job_id, errors=impossible))
        elif blocked_by:
            decisions.append(Admission(job_id=job.job_id, message=f"waits behind job {blocked_by}, which came first"))
        elif free.holds(job.worker) >= job.workers:
            free -= asked
            decisions.append(Admission(job_id=job.job_id, start=True))
        else:
            text = f"{job.workers} workers ask for {asked} at once; {free} are free now"
            if not capacity.nodes:
                text = "the cluster has no live machine; if it is not coming up, 'dmuonctl down' and 'up' start anew"
            decisions.append(Admission(job_id=job.job_id, message=text))
            blocked_by = job.job_id if job.waited_s > STARVATION_S else ""
    return decisions


def _impossible(job: Waiting, capacity: Capacity) -> tuple[FieldError, ...]:
    if not capacity.nodes:
        return ()  # a cluster without nodes is one that is coming up
    largest = max(capacity.nodes, key=lambda node: (node.holds(job.worker), node.cpus, node.gpus))
    if largest.holds(job.worker) < 1:
        message = f"a worker asks for {job.worker}; the largest machine has {largest}"
        cure = "Ask for less in /resources."
        return (FieldError(pointer="/resources", code="infeasible", message=message, suggestion=cure),)
    places = int(sum(node.holds(job.worker) for node in capacity.nodes))
    if places < job.workers:
        total = sum(capacity.nodes, Resources())
        message = (
            f"{job.workers} workers ask for {job.worker.times(job.workers)}; the cluster's {len(capacity.nodes)} "
            f"machine(s) have {total}, room for {places}"
        )
        cure = f"Use at most {places} workers in /mesh, or ask for less in /resources."
        return (FieldError(pointer="/mesh", code="infeasible", message=message, suggestion=cure),)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why and how a job ends."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """What is known about a job whose attempt is under way, after its supervisor was asked."""

    state: JobState
    now: float
    deadline_at: float
    """When every worker must have joined the group."""
    formed: bool
    intended: End | None
    """The recorded end of a job that is STOPPING."""
    reported: End | None
    """The end that the supervisor reported."""
    gone: bool = False
    """Positive evidence that the supervisor is dead."""
    remains: tuple[str, ...] = ()
    """What a dead supervisor left behind."""
    stop_sent_at: float | None = None


class AttemptAction(StrEnum):
    """What to do next about an attempt."""

    NOTHING = "nothing"
    RUN = "run"
    """Every worker has joined: the job is RUNNING."""
    STOP = "stop"
    """Record the end: the job is STOPPING."""
    SEND_STOP = "send_stop"
    """Ask the supervisor (again) to end."""
    FINISH = "finish"
    """Nothing is alive: the job is over."""


def decide_attempt(view: AttemptView) -> tuple[AttemptAction, End | None]:
    """Return the next thing to do, and the end that it is about."""
    end = view.reported or (_lost() if view.gone else None)
    if view.state is JobState.STOPPING:
        if end is not None and not view.remains:
            return AttemptAction.FINISH, decide_end(view.intended, end)
        due = view.stop_sent_at is None or view.now - view.stop_sent_at >= STOP_AGAIN_S
        return (AttemptAction.SEND_STOP if due and end is None else AttemptAction.NOTHING), view.intended
    if end is not None:
        return AttemptAction.STOP, end
    if view.state is JobState.STARTING and view.formed:
        return AttemptAction.RUN, None
    if view.state is JobState.STARTING and view.now > view.deadline_at:
        late = view.now - view.deadline_at
        message = f"not every worker joined the process group in time ({late:.1f} s past the start deadline)"
        return AttemptAction.STOP, End(reason=Reason.SETUP_FAILED, message=message)
    return AttemptAction.NOTHING, None


def _lost() -> End:
    message = "the supervisor of the attempt is dead, and with it its workers and the reports it had not handed over"
    return End(reason=Reason.WORKER_LOST, message=message)


def decide_end(intended: End | None, found: End) -> End:
    """Return the end of a job that was to end as ``intended`` and of whose end ``found`` was reported.

    Work that was completed was completed, whatever was asked for meanwhile. Otherwise the first recorded reason
    counts: what a stop makes of the workers is not why they were stopped.
    """
    if intended is None or found.reason is Reason.COMPLETED:
        return found
    return intended
