"""QUEUED -> STARTING for whole gangs that fit, FAILED for those that never can, a stated reason for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from orchestrator.errors import LauncherUnavailable, StaleWrite
from orchestrator.launcher_api import Resources
from orchestrator.reconcile.context import Context
from orchestrator.reconcile.decide import Admission, Waiting, decide_admissions, demand_of
from orchestrator.store.attempts import last_attempt, new_attempt
from orchestrator.store.jobs import jobs_in
from orchestrator.store.kernels import breaker_rows, policy_for
from orchestrator.store.models import Job
from orchestrator.store.swaps import swaps_of
from orchestrator.store.transitions import change_state, locked_job, set_condition
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["admit_queued"]

CONDITION = "Admitted"


def admit_queued(context: Context) -> int:
    """Decide about every job in the queue; return how many started."""
    with context.database.read() as session:
        jobs = sorted(jobs_in(session, JobState.QUEUED), key=_turn)
        reserved = _reserved(session) if jobs else Resources()
    if not jobs:
        return 0
    try:
        capacity = context.launcher.capacity()
    except LauncherUnavailable as error:
        for job in jobs:
            _note(context, job, "Unknown", "launcher_unavailable", str(error))
        return 0
    waiting = [_waiting(job, context.clock()) for job in jobs]
    decisions = decide_admissions(waiting, capacity, reserved)
    return sum(_apply(context, job, decision) for job, decision in zip(jobs, decisions, strict=True))


def _turn(job: Job) -> tuple[int, int]:
    """Sort key: the highest priority first, then the oldest."""
    return -JobSpec.model_validate_json(job.spec).priority, job.number


def _waiting(job: Job, now: float) -> Waiting:
    spec = JobSpec.model_validate_json(job.spec)
    waited_s = now - job.created_at
    return Waiting(job_id=job.id, worker=demand_of(spec), workers=spec.world_size, waited_s=waited_s)


def _reserved(session: Session) -> Resources:
    """What jobs will take that have started and do not hold their resources yet."""
    starting: Sequence[Job] = jobs_in(session, JobState.STARTING)
    total = Resources()
    for job in starting:
        attempt = last_attempt(session, job.id)
        if attempt is not None and attempt.placed_at is None:
            spec = JobSpec.model_validate_json(job.spec)
            total += demand_of(spec).times(spec.world_size)
    return total


def _apply(context: Context, job: Job, decision: Admission) -> bool:
    if not decision.start and (not decision.errors or _ran_before(context, job)):
        text = decision.message or "; ".join(error.message for error in decision.errors)
        _note(context, job, "False", "waiting_for_capacity", text)
        return False
    now = context.clock()
    try:
        with context.database.write() as session:
            if decision.errors:
                _refuse(session, context, job, decision, now)
            else:
                row = change_state(session, job.id, JobState.STARTING, guard=context.guard(job), now=now)
                policy = policy_for(breaker_rows(session), swaps_of(session, job.id), job.id)
                attempt = new_attempt(session, row, now=now, epoch=policy.epoch)
                set_condition(session, row, CONDITION, "True", "admitted", f"attempt {attempt.number} starts", now=now)
    except StaleWrite:
        return False  # cancelled meanwhile
    context.changed()
    return decision.start


def _ran_before(context: Context, job: Job) -> bool:
    """A job that had room once waits for it to come back: what a lost node leaves is not all that there will be."""
    with context.database.read() as session:
        return last_attempt(session, job.id) is not None


def _refuse(session: Session, context: Context, job: Job, decision: Admission, now: float) -> None:
    change_state(
        session,
        job.id,
        JobState.FAILED,
        guard=context.guard(job),
        now=now,
        reason=Reason.INFEASIBLE,
        message="; ".join(error.message for error in decision.errors),
        errors=decision.errors,
    )


def _note(context: Context, job: Job, status: str, reason: str, message: str) -> None:
    with context.database.write() as session:
        row = locked_job(session, job.id)
        if row.version != job.version:
            return
        changed = set_condition(session, row, CONDITION, status, reason, message, now=context.clock())
        row.message = message
    if changed:
        context.changed()
