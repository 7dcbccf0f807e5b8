"""Asking a job to stop for a while: pausing and resuming it, and making it give way to another one."""

from __future__ import annotations

from sqlalchemy.orm import Session

from orchestrator.errors import Conflict, JobFinished
from orchestrator.store.models import Job
from orchestrator.store.transitions import Guard, add_event, change_state, locked_job
from worker.contract.states import JobState, Reason

__all__ = ["ALIVE", "pause_job", "request_preemption", "resume_job", "turn_into_cancellation"]

ALIVE = (JobState.STARTING, JobState.RUNNING)
"""States in which a job holds resources and nobody has asked it to stop."""
_YIELDING = frozenset(
    {Reason.PAUSED, Reason.PREEMPTED, Reason.WORKER_LOST, Reason.NODE_LOST, Reason.STALLED, Reason.INTERNAL}
)
"""Intended ends of a STOPPING job after which it could run again."""


def pause_job(session: Session, job_id: str, *, now: float) -> Job:
    """Pause: what runs saves a checkpoint and releases everything; what waits leaves the queue.

    Asking again changes nothing.

    Raises:
        JobFinished: it is over.
        Conflict: it has no plan yet, or is ending in another way.
    """
    job = locked_job(session, job_id)
    state = JobState(job.state)
    if state is JobState.PAUSED or (state is JobState.STOPPING and job.reason == Reason.PAUSED):
        return job
    if state.terminal:
        raise JobFinished(f"job {job_id} is {state} ({job.reason}): there is nothing to pause")
    if state is JobState.SUBMITTED:
        raise Conflict(f"job {job_id} is SUBMITTED and being planned; pause it once it is QUEUED, or cancel it")
    if state is JobState.STOPPING:
        raise Conflict(f"job {job_id} is STOPPING ({job.reason}); pause it when it is QUEUED again, if it will be")
    new = JobState.STOPPING if state in ALIVE else JobState.PAUSED
    when = " once it is PAUSED" if new is JobState.STOPPING else ""
    message = f"paused on request; 'dmuonctl resume {job_id}' continues it{when}"
    return change_state(session, job_id, new, guard=Guard(job.version), now=now, reason=Reason.PAUSED, message=message)


def resume_job(session: Session, job_id: str, *, now: float) -> Job:
    """Put a paused job back into the queue; it continues from its newest checkpoint. One that goes on is left alone.

    Raises:
        JobFinished: it is over.
        Conflict: it has not finished pausing.
    """
    job = locked_job(session, job_id)
    state = JobState(job.state)
    if state.terminal:
        raise JobFinished(f"job {job_id} is {state} ({job.reason}): there is nothing to resume")
    if state is JobState.STOPPING:
        raise Conflict(f"job {job_id} is STOPPING ({job.reason}); resume it once it is PAUSED")
    if state is not JobState.PAUSED:
        return job
    return change_state(
        session, job_id, JobState.QUEUED, guard=Guard(job.version), now=now, message="resumed on request"
    )


def request_preemption(session: Session, job_id: str, by: str, *, guard: Guard, now: float) -> Job:
    """Make a running job save a checkpoint, release everything and go back into the queue.

    Args:
        by: who needs the room, as text for people.
        guard: of the reconciler that decided this.

    Raises:
        StaleWrite, LeaseLost, IllegalTransition: it no longer runs, or this control plane no longer decides.
    """
    message = f"preempted by {by}; continues from its checkpoint when there is room"
    return change_state(
        session, job_id, JobState.STOPPING, guard=guard, now=now, reason=Reason.PREEMPTED, message=message
    )


def turn_into_cancellation(session: Session, job: Job, *, now: float) -> None:
    """Make a job that is stopping for a while, or to be started again, end for good instead."""
    if job.reason in _YIELDING:
        add_event(session, job, "cancel_requested", f"cancelled while it was stopping ({job.reason})", now=now)
        job.reason, job.message, job.version = Reason.CANCELLED, "cancelled on request", job.version + 1
