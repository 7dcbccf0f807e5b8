"""What each project may use at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from orchestrator.errors import QuotaExceeded
from orchestrator.quota import Quota
from orchestrator.store.models import Job, QuotaRow
from worker.contract.states import JobState

__all__ = ["EVERY_OTHER", "check_queue_room", "find_quota", "quota_rows", "quotas_for", "set_quota"]

EVERY_OTHER = "*"
"""Name of the quota of each project that has none of its own."""
_WAITING = (JobState.SUBMITTED, JobState.QUEUED, JobState.RESTARTING)


def quota_rows(session: Session) -> Sequence[QuotaRow]:
    """Return all quotas by name."""
    return session.scalars(select(QuotaRow).order_by(QuotaRow.project)).all()


def find_quota(session: Session, project: str) -> QuotaRow | None:
    """Return the quota that counts for a project: its own, else that of every other; None without both."""
    rows = session.scalars(select(QuotaRow).where(QuotaRow.project.in_((project, EVERY_OTHER)))).all()
    return max(rows, key=lambda row: row.project == project, default=None)


def quotas_for(session: Session, projects: Iterable[str]) -> dict[str, Quota]:
    """Return the quota of each of ``projects`` that has one."""
    rows = {row.project: row for row in quota_rows(session)}
    found = {project: rows.get(project) or rows.get(EVERY_OTHER) for project in projects}
    return {
        project: Quota(cpus=row.cpus, gpus=row.gpus, memory_bytes=row.memory_bytes, jobs=row.jobs)
        for project, row in found.items()
        if row is not None
    }


def check_queue_room(session: Session, project: str) -> None:
    """Raise :class:`QuotaExceeded` when as many jobs of a project wait as may."""
    quota = find_quota(session, project)
    if quota is None or quota.waiting_jobs is None:
        return
    waiting = session.scalar(
        select(func.count()).select_from(Job).where(Job.project == project, Job.state.in_(_WAITING))
    )
    if int(waiting or 0) >= quota.waiting_jobs:
        raise QuotaExceeded(
            f"{waiting} jobs of project {project} wait, as many as may ({quota.waiting_jobs}); submit again when "
            "one has started, cancel one, or have the quota raised"
        )


def set_quota(session: Session, project: str, *, actor: str, now: float, **bounds: float | int | None) -> QuotaRow:
    """Write the quota of a project; what is not named is unbounded."""
    row = session.get(QuotaRow, project)
    if row is None:
        row = QuotaRow(project=project, version=0)
        session.add(row)
    for name in ("cpus", "gpus", "memory_bytes", "jobs", "waiting_jobs"):
        setattr(row, name, bounds.get(name))
    row.version, row.actor, row.changed_at = row.version + 1, actor, now
    session.flush()
    return row
