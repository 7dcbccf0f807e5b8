"""From one attempt to the next: carrying out what :mod:`orchestrator.reconcile.restarts` decides."""

from __future__ import annotations

import json

from sqlalchemy.orm import Session

from orchestrator.errors import StaleWrite
from orchestrator.reconcile.context import Context
from orchestrator.reconcile.decide import End
from orchestrator.reconcile.restarts import Past, decide_next
from orchestrator.store.attempts import attempts_of, totals_of
from orchestrator.store.jobs import conditions_of, find_job, jobs_in
from orchestrator.store.models import Job
from orchestrator.store.transitions import Guard, Value, change_state, locked_job, set_condition
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["move_on", "queue_restarts"]

CONDITION = "Restarting"


def move_on(session: Session, guard: Guard, job_id: str, end: End, *, now: float) -> Job:
    """Move a STOPPING job to where the end of its attempt leads; the attempt's end is stored already."""
    session.flush()
    job = find_job(session, job_id)
    spec = JobSpec.model_validate_json(job.spec)
    following = decide_next(end, _past(session, job, end), spec)
    row = change_state(
        session, job_id, following.state, guard=guard, now=now, reason=end.reason, message=following.message
    )
    if following.state is JobState.RESTARTING:
        data: dict[str, Value] = {
            "again_at": now + following.delay_s, "restarts": following.used, "budget": following.budget,
        }  # fmt: skip
        set_condition(session, row, CONDITION, "True", end.reason, following.message, now=now, data=data)
    return row


def _past(session: Session, job: Job, end: End) -> list[Past]:
    rows = attempts_of(session, job.id)
    totals = totals_of(session, [row.id for row in rows])
    steps = {row.id: min((r.steps_done for r in totals.get(row.id, {}).values()), default=0) for row in rows}
    past = [Past(reason=Reason(row.end_reason), steps=steps[row.id]) for row in rows[:-1] if row.end_reason]
    return [*past, Past(reason=end.reason, steps=steps[rows[-1].id])]


def queue_restarts(context: Context) -> int:
    """Put every job whose pause is over back into the queue, where its age counts; return how many."""
    with context.database.read() as session:
        now = context.clock()
        due = [job for job in jobs_in(session, JobState.RESTARTING) if _again_at(session, job) <= now]
    return sum(_queue(context, job) for job in due)


def _again_at(session: Session, job: Job) -> float:
    data = next(json.loads(row.data) for row in conditions_of(session, job.id) if row.type == CONDITION)
    return float(data["again_at"])


def _queue(context: Context, job: Job) -> bool:
    now = context.clock()
    message = f"starts again: {job.message}"
    try:
        with context.database.write() as session:
            row = change_state(session, job.id, JobState.QUEUED, guard=context.guard(job), now=now, message=message)
            set_condition(session, locked_job(session, row.id), CONDITION, "False", "queued", message, now=now)
    except StaleWrite:
        return False  # cancelled or paused meanwhile
    context.changed()
    return True
