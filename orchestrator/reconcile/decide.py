"""Decisions of the reconciler. Pure: values in, a decision out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.launcher_api import Resources
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = [
    "FORCE_AFTER_S", "STOP_AGAIN_S", "AttemptAction", "AttemptView", "End", "Force", "decide_attempt", "decide_end",
    "decide_force", "demand_of",
]  # fmt: skip

STOP_AGAIN_S = 5.0
"""Pause between two requests to stop."""
FORCE_AFTER_S = 15.0
"""A supervisor ends its workers by itself when the patience is over; one that is silent so long after it does not."""


def demand_of(spec: JobSpec) -> Resources:
    """Return what one worker of a job needs."""
    need = spec.resources
    return Resources(need.cpus_per_worker, need.gpus_per_worker, float(need.memory_bytes_per_worker or 0))


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
    message = "the supervisor of the attempt is dead, and with it its workers"
    return End(reason=Reason.WORKER_LOST, message=message)


class Force(StrEnum):
    """What to do about an attempt whose supervisor cannot be asked."""

    WAIT = "wait"
    """It may be well, or has time left to stop."""
    END = "end"
    """End it unheard: it was to end, and nothing is lost that was to be kept."""
    KEEP = "keep"
    """It was to stop for a while and has saved nothing: to end it would lose its steps, which only a person may say."""


def decide_force(state: JobState, reason: str | None, stopping_s: float, patience_s: float, *, saved: bool) -> Force:
    """Tell whether to end, unheard, an attempt that cannot be asked: only one that is to end, and late.

    Args:
        reason: the intended end of a job that is STOPPING, which it has been for ``stopping_s`` seconds.
        saved: the job has a checkpoint, from which it can go on.
    """
    if state is not JobState.STOPPING or stopping_s <= patience_s + FORCE_AFTER_S:
        return Force.WAIT
    goes_on = reason in (Reason.PAUSED, Reason.PREEMPTED)
    return Force.KEEP if goes_on and not saved else Force.END


def decide_end(intended: End | None, found: End) -> End:
    """Return the end of a job that was to end as ``intended`` and of whose end ``found`` was reported.

    Work that was completed was completed, whatever was asked for meanwhile. Otherwise the first recorded reason
    counts: what a stop makes of the workers is not why they were stopped.
    """
    if intended is None or found.reason is Reason.COMPLETED:
        return found
    return intended
