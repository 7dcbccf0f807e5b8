"""SUBMITTED -> QUEUED with a plan, or FAILED with all reasons. Runs beside the other passes, since planning is slow."""

from __future__ import annotations

import json
from itertools import islice

from orchestrator.errors import PlannerFailed, PlanRefusedProblem, StaleWrite
from orchestrator.reconcile.context import Context
from orchestrator.store.jobs import conditions_of_type, jobs_in, keep_plan
from orchestrator.store.models import Condition, Job
from orchestrator.store.transitions import Value, change_state, locked_job, set_condition
from worker.contract.errors import FieldError
from worker.contract.plan import PlanReport
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["MAX_FAILURES", "PAUSE_S", "plan_submitted"]

CONDITION = "Planned"
MAX_FAILURES, PAUSE_S = 3, 5.0
_AT_ONCE = 8
"""Tries, and the pause after the first that failed (s); each further pause is twice as long."""


def plan_submitted(context: Context) -> int:
    """Plan the oldest jobs that wait for a plan, a few at a time; return how many moved."""
    with context.database.read() as session:
        now = context.clock()
        failed = conditions_of_type(session, CONDITION, JobState.SUBMITTED)
        due = (job for job in jobs_in(session, JobState.SUBMITTED) if _failures(failed.get(job.id))[1] <= now)
        jobs = list(islice(due, _AT_ONCE))
    return sum(_plan_one(context, job) for job in jobs)


def _plan_one(context: Context, job: Job) -> bool:
    spec = JobSpec.model_validate_json(job.spec)
    try:
        plan = context.planner.plan(spec)
    except PlanRefusedProblem as refused:
        return _fail(context, job, Reason.PLAN_REFUSED, refused.detail, refused.errors)
    except PlannerFailed as failed:
        return _try_later(context, job, str(failed))
    if job.expected_plan_hash not in (None, plan.plan_hash):
        message = f"the plan is {plan.plan_hash}; the submission expected {job.expected_plan_hash}"
        cure = "Plan again, look at what changed, and submit with the new hash."
        error = FieldError(pointer="", code="plan_mismatch", message=message, suggestion=cure)
        return _fail(context, job, Reason.PLAN_REFUSED, message, (error,))
    return _queue(context, job, plan)


def _queue(context: Context, job: Job, plan: PlanReport) -> bool:
    now = context.clock()
    try:
        with context.database.write() as session:
            keep_plan(session, plan, now=now)
            message = f"planned: {plan.world_size} workers, plan {plan.plan_hash[:12]}"
            row = change_state(session, job.id, JobState.QUEUED, guard=context.guard(job), now=now, message=message)
            row.plan_hash = plan.plan_hash
            row.planned_bytes = max((rank.peak_bytes for rank in plan.ranks), default=None)
            set_condition(session, row, CONDITION, "True", "planned", message, now=now)
    except StaleWrite:
        return False  # cancelled while it was planned
    context.changed()
    return True


def _fail(context: Context, job: Job, reason: Reason, message: str, errors: tuple[FieldError, ...] = ()) -> bool:
    try:
        with context.database.write() as session:
            change_state(
                session,
                job.id,
                JobState.FAILED,
                guard=context.guard(job),
                now=context.clock(),
                reason=reason,
                message=message,
                errors=errors,
            )
    except StaleWrite:
        return False
    context.changed()
    return True


def _failures(row: Condition | None) -> tuple[int, float]:
    """Return how often the planner failed on a job, and when to try again."""
    if row is None or row.status != "Unknown":
        return 0, 0.0
    data = json.loads(row.data)
    return int(data["failures"]), float(data["again_at"])


def _try_later(context: Context, job: Job, message: str) -> bool:
    """The planner failed by itself: try again a few times, with growing pauses; then it is our fault."""
    now = context.clock()
    with context.database.write() as session:
        failures = _failures(session.get(Condition, (job.id, CONDITION)))[0] + 1
        row = locked_job(session, job.id)
        if failures < MAX_FAILURES and row.version == job.version:
            data: dict[str, Value] = {"failures": failures, "again_at": now + PAUSE_S * 2 ** (failures - 1)}
            set_condition(session, row, CONDITION, "Unknown", "planner_failed", message, now=now, data=data)
    context.changed()
    return failures >= MAX_FAILURES and _fail(context, job, Reason.INTERNAL, message)
