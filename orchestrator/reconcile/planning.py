"""SUBMITTED -> QUEUED with a plan, or FAILED with all reasons. Runs beside the other passes, since planning is slow."""

from __future__ import annotations

from orchestrator.errors import PlannerFailed, PlanRefusedProblem, StaleWrite
from orchestrator.reconcile.context import Context
from orchestrator.store.jobs import jobs_in, keep_plan
from orchestrator.store.models import Job
from orchestrator.store.transitions import change_state, locked_job, set_condition
from worker.contract.errors import FieldError
from worker.contract.plan import PlanReport
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["plan_submitted"]


def plan_submitted(context: Context) -> int:
    """Plan every job that waits for a plan; return how many moved."""
    with context.database.read() as session:
        jobs = jobs_in(session, JobState.SUBMITTED)
    return sum(_plan_one(context, job) for job in jobs)


def _plan_one(context: Context, job: Job) -> bool:
    spec = JobSpec.model_validate_json(job.spec)
    try:
        plan = context.planner.plan(spec)
    except PlanRefusedProblem as refused:
        return _fail(context, job, refused.detail, refused.errors)
    except PlannerFailed as failed:
        _set_unknown(context, job, str(failed))
        return False
    if job.expected_plan_hash not in (None, plan.plan_hash):
        message = f"the plan is {plan.plan_hash}; the submission expected {job.expected_plan_hash}"
        cure = "Plan again, look at what changed, and submit with the new hash."
        error = FieldError(pointer="", code="plan_mismatch", message=message, suggestion=cure)
        return _fail(context, job, message, (error,))
    return _queue(context, job, plan)


def _queue(context: Context, job: Job, plan: PlanReport) -> bool:
    now = context.clock()
    try:
        with context.database.write() as session:
            keep_plan(session, plan, now=now)
            message = f"planned: {plan.world_size} workers, plan {plan.plan_hash}"
            row = change_state(session, job.id, JobState.QUEUED, guard=context.guard(job), now=now, message=message)
            row.plan_hash = plan.plan_hash
            set_condition(session, row, "Planned", "True", "planned", message, now=now)
    except StaleWrite:
        return False  # cancelled while it was planned
    context.changed()
    return True


def _fail(context: Context, job: Job, message: str, errors: tuple[FieldError, ...]) -> bool:
    try:
        with context.database.write() as session:
            change_state(
                session,
                job.id,
                JobState.FAILED,
                guard=context.guard(job),
                now=context.clock(),
                reason=Reason.PLAN_REFUSED,
                message=message,
                errors=errors,
            )
    except StaleWrite:
        return False
    context.changed()
    return True


def _set_unknown(context: Context, job: Job, message: str) -> None:
    with context.database.write() as session:
        row = locked_job(session, job.id)
        if row.version == job.version:
            set_condition(session, row, "Planned", "Unknown", "planner_failed", message, now=context.clock())
    context.changed()
