"""The life of a job: states, the one table of legal transitions, and the reasons for which a job ends."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Final

__all__ = ["TRANSITIONS", "Blame", "IllegalTransition", "JobState", "Reason", "check_transition"]


class JobState(StrEnum):
    """Where a job is. The comment says what is alive."""

    SUBMITTED = "SUBMITTED"
    """The row exists; the spec is valid; no plan yet. Nothing runs."""
    QUEUED = "QUEUED"
    """A plan exists; the job waits for room. Nothing runs."""
    STARTING = "STARTING"
    """A supervisor exists or is being made; resources may be held; no step has been reported."""
    RUNNING = "RUNNING"
    """Every rank has joined the process group; steps are being reported."""
    RESTARTING = "RESTARTING"
    """The last attempt is verified gone; the next waits for its backoff. Nothing runs."""
    PAUSED = "PAUSED"
    """It waits for somebody to resume it, and continues from its checkpoint then. Nothing runs."""
    STOPPING = "STOPPING"
    """The intended end and its reason are recorded; processes and resources are being verified gone."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """True when nothing of the job is alive and nothing will ever change."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


TRANSITIONS: Final = MappingProxyType(
    {
        JobState.SUBMITTED: frozenset({JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
        JobState.QUEUED: frozenset({JobState.STARTING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}),
        JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}),
        JobState.RUNNING: frozenset({JobState.STOPPING}),
        JobState.STOPPING: frozenset(
            {
                JobState.RESTARTING,
                JobState.QUEUED,
                JobState.PAUSED,
                JobState.SUCCEEDED,
                JobState.FAILED,
                JobState.CANCELLED,
            }
        ),
        JobState.RESTARTING: frozenset({JobState.QUEUED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}),
        JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
        JobState.SUCCEEDED: frozenset[JobState](),
        JobState.FAILED: frozenset[JobState](),
        JobState.CANCELLED: frozenset[JobState](),
    }
)


class Blame(StrEnum):
    """Whose fault an end was."""

    NOBODY = "nobody"
    USER = "user"
    INFRASTRUCTURE = "infrastructure"
    PLATFORM = "platform"


class Reason(StrEnum):
    """Why a job ended. Stored as text, so that an old reader survives a new member."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    PREEMPTED = "preempted"
    SPEC_INVALID = "spec_invalid"
    PLAN_REFUSED = "plan_refused"
    INFEASIBLE = "infeasible"
    SETUP_FAILED = "setup_failed"
    USER_ERROR = "user_error"
    NON_FINITE = "non_finite"
    WORKER_LOST = "worker_lost"
    NODE_LOST = "node_lost"
    STALLED = "stalled"
    INTERNAL = "internal"

    @property
    def blame(self) -> Blame:
        """Whose fault this reason is."""
        return _BLAME[self]

    @property
    def end_state(self) -> JobState:
        """The state that this reason leads to when the job is not restarted; terminal but for a pause or preemption."""
        return _END_STATE.get(self, JobState.FAILED)


_END_STATE: Final = MappingProxyType(
    {
        Reason.COMPLETED: JobState.SUCCEEDED,
        Reason.CANCELLED: JobState.CANCELLED,
        Reason.PAUSED: JobState.PAUSED,
        Reason.PREEMPTED: JobState.QUEUED,
    }
)
_BLAME: Final = MappingProxyType(
    {
        Reason.COMPLETED: Blame.NOBODY,
        Reason.CANCELLED: Blame.NOBODY,
        Reason.PAUSED: Blame.NOBODY,
        Reason.PREEMPTED: Blame.NOBODY,
        Reason.SPEC_INVALID: Blame.USER,
        Reason.PLAN_REFUSED: Blame.USER,
        Reason.INFEASIBLE: Blame.USER,
        Reason.SETUP_FAILED: Blame.USER,
        Reason.USER_ERROR: Blame.USER,
        Reason.NON_FINITE: Blame.USER,
        Reason.WORKER_LOST: Blame.INFRASTRUCTURE,
        Reason.NODE_LOST: Blame.INFRASTRUCTURE,
        Reason.STALLED: Blame.INFRASTRUCTURE,
        Reason.INTERNAL: Blame.PLATFORM,
    }
)


class IllegalTransition(ValueError):
    """A move that the table does not have."""

    def __init__(self, old: JobState, new: JobState) -> None:
        self.old, self.new = old, new
        super().__init__(old, new)

    def __str__(self) -> str:
        legal = ", ".join(sorted(TRANSITIONS[self.old])) or "none: the state is terminal"
        return f"a job cannot go from {self.old} to {self.new}; legal moves: {legal}"


def check_transition(old: JobState, new: JobState) -> None:
    """Raise :class:`IllegalTransition` unless ``old -> new`` is in :data:`TRANSITIONS`."""
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(old, new)
