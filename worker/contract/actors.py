"""How the control plane finds the Ray side without importing it: names, namespace, entry points and method names.

The supervisor actor answers (every argument and result is JSON text of a message):

| method | arguments | result |
|---|---|---|
| ``start`` | ``AttemptStart`` | ``None``; returns at once, the attempt runs on |
| ``poll`` | fence, cursor (last seq read), limit | ``PollBatch``; entries up to the cursor are forgotten |
| ``set_kernels`` | fence, ``KernelPolicy`` | ``None`` |
| ``stop`` | fence, ``StopRequest`` | ``None``; asking again is harmless |
| ``leave`` | fence | ``None``; the actor exits, after the end has been read |
"""

from __future__ import annotations

__all__ = ["GPU_ENTRY", "NAMESPACE", "PLAN_ENTRY", "START_ENTRY", "rank_name", "supervisor_name"]

NAMESPACE = "dmuon"
START_ENTRY = "worker.actors.entry:start_supervisor"
"""``start_supervisor(attempt_json: str) -> None``, run in a Ray task: makes the named detached supervisor and starts
it. Idempotent: an existing supervisor of the same name is left as it is."""
PLAN_ENTRY = "worker.planner:answer"
"""``answer(request_json: str) -> str``: plans in whatever process has torch."""
GPU_ENTRY = "worker.gpus:answer"
"""``answer(number: str) -> str``: looks who holds the GPUs of its node, of which Ray has ``number``; a ``GpuLook``."""


def supervisor_name(job_id: str, attempt: int) -> str:
    """Ray actor name of an attempt's supervisor."""
    return f"supervisor:{job_id}:{attempt}"


def rank_name(job_id: str, attempt: int, rank: int) -> str:
    """Ray actor name of one rank of an attempt; as long as Ray knows it, something of the attempt is left."""
    return f"rank:{job_id}:{attempt}:{rank}"
