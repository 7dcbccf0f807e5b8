"""The one function that changes a job's state, and the writing of events and conditions beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from orchestrator.errors import LeaseLost, NotFound, StaleWrite
from orchestrator.store.models import Condition, Event, Job, Lease
from worker.contract.errors import FieldError
from worker.contract.states import JobState, Reason, check_transition

__all__ = ["LEASE", "Guard", "Note", "Value", "add_event", "change_state", "locked_job", "note_all", "set_condition"]

LEASE = "reconciler"
Value = str | int | float | bool | None
_WITH_A_FUTURE = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.RESTARTING})
"""States of jobs that go on: they have no reason to end."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What must still be true for a write: the version that was read, and (for the reconciler) its lease."""

    version: int
    holder: str | None = None


def locked_job(session: Session, job_id: str) -> Job:
    """Return the row, locked until the transaction ends.

    Raises:
        NotFound: no such job.
    """
    job = session.scalar(select(Job).where(Job.id == job_id).with_for_update())
    if job is None:
        raise NotFound(f"there is no job {job_id!r}")
    return job


def change_state(
    session: Session,
    job_id: str,
    new: JobState,
    *,
    guard: Guard,
    now: float,
    reason: Reason | None = None,
    message: str = "",
    errors: Sequence[FieldError] = (),
) -> Job:
    """Move a job to ``new`` and write the event, in the transaction of ``session``.

    Raises:
        IllegalTransition: the table does not have this move.
        StaleWrite: the job changed since it was read.
        LeaseLost: another control plane reconciles now.
    """
    job = locked_job(session, job_id)
    if job.version != guard.version:
        raise StaleWrite(f"job {job_id} is at version {job.version}; this write was decided at {guard.version}")
    _check_lease(session, guard)
    old = JobState(job.state)
    check_transition(old, new)
    job.state, job.version, job.state_since = new, job.version + 1, now
    if new in _WITH_A_FUTURE:
        job.reason = None  # why the last attempt ended stands with that attempt
    elif reason is not None:
        job.reason = reason
    if reason is not None or (not new.terminal and job.reason is None):
        job.message = message  # why a job waits is no longer true once it has moved on
    if errors:
        job.field_errors = json.dumps([error.model_dump() for error in errors])
    if new.terminal:
        job.finished_at = now
    data: dict[str, Value] = {"from": old, "to": new, "reason": reason}
    add_event(session, job, "state", message or f"{old} to {new}", now=now, data=data)
    return job


def _check_lease(session: Session, guard: Guard) -> None:
    if guard.holder is None:
        return
    lease = session.get(Lease, LEASE)
    if lease is None or lease.holder != guard.holder:
        raise LeaseLost("this control plane lost its lease: another one reconciles")


def add_event(
    session: Session, job: Job, kind: str, message: str, *, now: float, data: Mapping[str, Value] | None = None
) -> None:
    """Append an event to a job whose row this transaction holds."""
    job.last_event += 1
    row = Event(job_id=job.id, seq=job.last_event, at=now, kind=kind, message=message, data=json.dumps(data or {}))
    session.add(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A condition to be recorded, of a job as it was when ``version`` was read."""

    job_id: str
    version: int
    status: str
    reason: str
    message: str


def note_all(session: Session, kind: str, notes: Sequence[Note], *, now: float) -> bool:
    """Record one type of condition, and what is shown of it, on many jobs at once; those that moved on are left alone.

    Returns:
        True when the status or reason of any changed.
    """
    ids = [note.job_id for note in notes]
    jobs = {job.id: job for job in session.scalars(select(Job).where(Job.id.in_(ids)).with_for_update())}
    query = select(Condition).where(Condition.type == kind, Condition.job_id.in_(ids))
    rows = {row.job_id: row for row in session.scalars(query)}
    changed = False
    with session.no_autoflush:  # all is written together at the end
        for note in notes:
            job = jobs.get(note.job_id)
            if job is None or job.version != note.version:
                continue
            job.message = note.message
            row = rows.get(job.id)
            if row is None:
                row = Condition(job_id=job.id, type=kind, status="", reason="", message="", data="{}", since=now)
                session.add(row)
            changed |= _change(session, job, row, note.status, note.reason, note.message, now)
    return changed


def _change(session: Session, job: Job, row: Condition, status: str, reason: str, message: str, now: float) -> bool:
    changed = (row.status, row.reason) != (status, reason)
    row.message = message
    if changed:
        row.status, row.reason, row.since = status, reason, now
        data: dict[str, Value] = {"type": row.type, "status": status, "reason": reason}
        add_event(session, job, "condition", message, now=now, data=data)
    return changed


def set_condition(
    session: Session,
    job: Job,
    kind: str,
    status: str,
    reason: str,
    message: str,
    *,
    now: float,
    data: Mapping[str, Value] | None = None,
) -> bool:
    """Record what is known about one aspect of a job; an event is written when status or reason change.

    Returns:
        True when they changed.
    """
    row = session.get(Condition, (job.id, kind))
    if row is None:
        row = Condition(job_id=job.id, type=kind, status="", reason="", message="", since=now)
        session.add(row)
    row.data = json.dumps(data or {})
    return _change(session, job, row, status, reason, message, now)
