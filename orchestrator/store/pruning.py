"""Removing what nobody looks at any more: reports and small events of jobs that ended long ago, old audit entries."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, exists, func, select
from sqlalchemy.orm import Session

from orchestrator.store.models import Attempt, AuditRow, Event, Job, RankReportRow
from orchestrator.store.transitions import add_event, locked_job

__all__ = ["KEPT_EVENTS", "old_jobs", "prune_audit", "prune_job"]

KEPT_EVENTS = ("submitted", "state", "attempt_end", "rank_error", "alarm", "checkpoint_saved", "pruned")
"""Kinds that tell what became of a job; they stay."""
_DONE = "pruned"


def old_jobs(session: Session, *, ended_before: float, limit: int) -> Sequence[str]:
    """Return ids of jobs that ended before a time and were not pruned, oldest first."""
    pruned = exists().where(Event.job_id == Job.id, Event.kind == _DONE)
    query = select(Job.id).where(Job.finished_at < ended_before, ~pruned).order_by(Job.finished_at).limit(limit)
    return session.scalars(query).all()


def prune_job(session: Session, job_id: str, *, now: float) -> int:
    """Remove a job's step reports and small events, and say so in an event; its totals, plan and ends stay.

    Returns:
        The number of rows that are gone.
    """
    job = locked_job(session, job_id)
    attempts = select(Attempt.id).where(Attempt.job_id == job_id)
    small = (Event.job_id == job_id, Event.kind.not_in(KEPT_EVENTS))
    reports = session.scalar(select(func.count()).where(RankReportRow.attempt_id.in_(attempts))) or 0
    events = session.scalar(select(func.count()).select_from(Event).where(*small)) or 0
    session.execute(delete(RankReportRow).where(RankReportRow.attempt_id.in_(attempts)))
    session.execute(delete(Event).where(*small))
    text = f"{reports} step reports, {events} events and the logs were removed: the job ended long ago"
    add_event(session, job, _DONE, text, now=now, data={"reports": reports, "events": events})
    return int(reports) + int(events)


def prune_audit(session: Session, *, before: float) -> None:
    """Remove audit entries from before a time."""
    session.execute(delete(AuditRow).where(AuditRow.at < before))
