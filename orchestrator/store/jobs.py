"""Jobs: submitting, finding, listing, cancelling."""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import and_, exists, func, or_, select
from sqlalchemy.orm import Session

from orchestrator.errors import InvalidPageToken, JobFinished, NotFound
from orchestrator.store.models import Condition, Event, Job, JobLabel, Plan
from orchestrator.store.stops import ALIVE, turn_into_cancellation
from orchestrator.store.transitions import Guard, change_state, locked_job
from worker.contract.plan import PlanReport
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = [
    "JobFilter", "JobLine", "cancel_job", "conditions_noted", "conditions_of", "conditions_of_type",
    "count_by_reason", "count_by_state", "events_after", "events_of_kinds", "find_job", "first_in_line", "job_lines",
    "jobs_ahead", "jobs_in", "jobs_shown", "keep_plan", "last_event_at", "last_events", "list_jobs", "plan_of",
    "queue_waits", "submit_job",
]  # fmt: skip

_LAST_EVENT = 2**31 - 2
_IDS_AT_ONCE = 500
LIVE = (JobState.STARTING, JobState.RUNNING, JobState.STOPPING, JobState.RESTARTING)
WAITING = (JobState.SUBMITTED, JobState.QUEUED)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """What a list shows; None shows all."""

    state: JobState | None = None
    project: str | None = None
    label: tuple[str, str] | None = None


def submit_job(session: Session, spec: JobSpec, *, now: float, expected_plan_hash: str | None = None) -> Job:
    """Insert a job in SUBMITTED, with its first event."""
    job = Job(
        id=secrets.token_hex(5),
        name=spec.name,
        project=spec.project,
        spec=spec.model_dump_json(),
        priority=spec.priority,
        expected_plan_hash=expected_plan_hash,
        state=JobState.SUBMITTED,
        version=1,
        message="",
        field_errors="[]",
        created_at=now,
        state_since=now,
        last_event=1,
    )
    session.add(job)
    session.flush()
    session.add_all(JobLabel(job_id=job.id, key=key, value=value) for key, value in spec.labels.items())
    message = f"job {spec.name} was submitted"
    session.add(Event(job_id=job.id, seq=1, at=now, kind="submitted", message=message, data="{}"))
    return job


def find_job(session: Session, job_id: str) -> Job:
    """Return the row.

    Raises:
        NotFound: no such job.
    """
    job = session.scalar(select(Job).where(Job.id == job_id))
    if job is None:
        raise NotFound(f"there is no job {job_id!r}")
    return job


def cancel_job(session: Session, job_id: str, *, now: float) -> Job:
    """Cancel: at once where nothing runs, else by recording the intended end, which the reconciler carries out.

    Asking again changes nothing.

    Raises:
        JobFinished: the job ended in another way.
    """
    job = locked_job(session, job_id)
    state = JobState(job.state)
    if state is JobState.STOPPING:
        turn_into_cancellation(session, job, now=now)
    if state is JobState.CANCELLED or state is JobState.STOPPING:
        return job
    if state.terminal:
        raise JobFinished(f"job {job_id} is {state} ({job.reason}): there is nothing to cancel")
    new = JobState.STOPPING if state in ALIVE else JobState.CANCELLED
    guard = Guard(job.version)
    return change_state(
        session, job_id, new, guard=guard, now=now, reason=Reason.CANCELLED, message="cancelled on request"
    )


def list_jobs(
    session: Session, wanted: JobFilter, *, page_size: int, page_token: str | None
) -> tuple[Sequence[Job], str | None]:
    """Return a page, newest first, and the token of the next page.

    Raises:
        InvalidPageToken: the token is of another list, or none of ours.
    """
    query = select(Job).order_by(Job.number.desc()).limit(page_size + 1)
    if wanted.state is not None:
        query = query.where(Job.state == wanted.state)
    if wanted.project is not None:
        query = query.where(Job.project == wanted.project)
    if wanted.label is not None:
        key, value = wanted.label
        labelled = select(JobLabel.job_id).where(JobLabel.key == key, JobLabel.value == value)
        query = query.where(Job.id.in_(labelled))
    if page_token:
        query = query.where(Job.number < _read_token(page_token, wanted))
    rows = session.scalars(query).all()
    more = len(rows) > page_size
    rows = rows[:page_size]
    return rows, _write_token(rows[-1].number, wanted) if more else None


def _identity(wanted: JobFilter) -> list[str | None]:
    return [wanted.state, wanted.project, "=".join(wanted.label) if wanted.label else None]


def _write_token(number: int, wanted: JobFilter) -> str:
    return base64.urlsafe_b64encode(json.dumps([number, _identity(wanted)]).encode()).decode().rstrip("=")


def _read_token(token: str, wanted: JobFilter) -> int:
    try:
        number, identity = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (ValueError, TypeError, RecursionError, binascii.Error):
        raise InvalidPageToken("page_token is not one that this service gave out; leave it out to start anew") from None
    if identity != _identity(wanted) or not isinstance(number, int) or not 0 <= number < 2**63:
        raise InvalidPageToken("page_token belongs to a list with other filters; repeat those, or start anew")
    return number


def jobs_in(session: Session, *states: JobState) -> Sequence[Job]:
    """Return the jobs in any of the states, oldest first."""
    return session.scalars(select(Job).where(Job.state.in_(states)).order_by(Job.number)).all()


class JobLine(NamedTuple):
    """What admission looks at, of each job of a queue that may be long."""

    id: str
    spec: str
    version: int
    state: str
    state_since: float
    reason: str | None
    planned_bytes: int | None


def job_lines(session: Session, *states: JobState) -> list[JobLine]:
    """Return the jobs in any of the states, oldest first."""
    columns = (Job.id, Job.spec, Job.version, Job.state, Job.state_since, Job.reason, Job.planned_bytes)
    rows = session.execute(select(*columns).where(Job.state.in_(states)).order_by(Job.number))
    return [JobLine(*row) for row in rows]


def first_in_line(session: Session, kind: str, reason: str) -> Job | None:
    """Return the queued job of the highest priority, the oldest of them; who waits for ``reason`` (a condition of type
    ``kind``) is passed over."""
    held = exists().where(Condition.job_id == Job.id, Condition.type == kind, Condition.reason == reason)
    query = select(Job).where(Job.state == JobState.QUEUED, ~held)
    return session.scalar(query.order_by(Job.priority.desc(), Job.number).limit(1))


def jobs_shown(session: Session, finished_after: float) -> Sequence[Job]:
    """Return the jobs that are alive or ended after a time, oldest first."""
    shown = or_(Job.finished_at.is_(None), Job.finished_at > finished_after)
    return session.scalars(select(Job).where(shown).order_by(Job.number)).all()


def keep_plan(session: Session, plan: PlanReport, *, now: float) -> None:
    """Store a plan, unless it is there."""
    if session.get(Plan, plan.plan_hash) is None:
        session.add(Plan(plan_hash=plan.plan_hash, body=plan.model_dump_json(), created_at=now))
        session.flush()


def plan_of(session: Session, job: Job) -> PlanReport | None:
    """Return the job's plan; None before it was planned."""
    row = session.get(Plan, job.plan_hash) if job.plan_hash is not None else None
    return None if row is None else PlanReport.model_validate_json(row.body)


def events_after(session: Session, job_id: str, seq: int, limit: int) -> Sequence[Event]:
    """Return up to ``limit`` events that follow ``seq``, in order."""
    first = min(seq, _LAST_EVENT) + 1  # a number that the column cannot hold is an error on PostgreSQL
    query = select(Event).where(Event.job_id == job_id, Event.seq >= first).order_by(Event.seq).limit(limit)
    return session.scalars(query).all()


def events_of_kinds(session: Session, job_id: str, kinds: Sequence[str], limit: int) -> Sequence[Event]:
    """Return the last ``limit`` events of some kinds, in order."""
    query = select(Event).where(Event.job_id == job_id, Event.kind.in_(kinds)).order_by(Event.seq.desc()).limit(limit)
    return session.scalars(query).all()[::-1]


def jobs_ahead(session: Session, job: Job) -> int:
    """Return how many jobs of the queue were submitted before ``job`` or have a higher priority."""
    before = or_(Job.priority > job.priority, and_(Job.priority == job.priority, Job.number < job.number))
    query = select(func.count()).select_from(Job).where(Job.state == JobState.QUEUED, before)
    return int(session.scalar(query) or 0)


def last_events(session: Session, job_ids: Sequence[str]) -> dict[str, int]:
    """Return the number of each job's last event, of those that exist."""
    found: dict[str, int] = {}
    for begin in range(0, len(job_ids), _IDS_AT_ONCE):
        part = job_ids[begin : begin + _IDS_AT_ONCE]
        rows = session.execute(select(Job.id, Job.last_event).where(Job.id.in_(part)))
        found |= {row.id: row.last_event for row in rows}
    return found


def last_event_at(session: Session, job_id: str, kind: str) -> float | None:
    """Return when an event of ``kind`` last happened to the job; None when it never did."""
    found = session.scalar(select(func.max(Event.at)).where(Event.job_id == job_id, Event.kind == kind))
    return None if found is None else float(found)


def conditions_of(session: Session, job_id: str) -> Sequence[Condition]:
    """Return the job's conditions by type."""
    return session.scalars(select(Condition).where(Condition.job_id == job_id).order_by(Condition.type)).all()


def conditions_noted(session: Session, kind: str, state: JobState) -> dict[str, tuple[str, str]]:
    """Return (reason, message) of the conditions of one type, by job, of all jobs in a state."""
    query = select(Condition.job_id, Condition.reason, Condition.message).join(Job, Job.id == Condition.job_id)
    rows = session.execute(query.where(Condition.type == kind, Job.state == state))
    return {job_id: (reason, message) for job_id, reason, message in rows}


def conditions_of_type(session: Session, kind: str, state: JobState) -> dict[str, Condition]:
    """Return the conditions of one type, by job, of all jobs in a state."""
    query = select(Condition).join(Job, Job.id == Condition.job_id).where(Condition.type == kind, Job.state == state)
    return {row.job_id: row for row in session.scalars(query)}


def count_by_state(session: Session) -> dict[str, int]:
    """Return the number of jobs in each state that has any."""
    rows = session.execute(select(Job.state, func.count()).group_by(Job.state))
    return {str(state): int(number) for state, number in rows}


def count_by_reason(session: Session) -> dict[str, int]:
    """Return the number of finished jobs by reason."""
    query = select(Job.reason, func.count()).where(Job.finished_at.is_not(None)).group_by(Job.reason)
    return {str(reason): number for reason, number in session.execute(query)}


def queue_waits(session: Session, bounds: Sequence[float]) -> tuple[list[int], int, float]:
    """Return how many jobs waited at most each of ``bounds`` (s), how many in all, and the sum of waits (s)."""
    waited = Job.queue_wait_s
    columns = [func.count().filter(waited <= bound) for bound in bounds]
    row = session.execute(
        select(*columns, func.count(), func.coalesce(func.sum(waited), 0.0)).where(waited.is_not(None))
    ).one()
    return [int(n) for n in row[: len(bounds)]], int(row[-2]), float(row[-1])
