"""QUEUED -> STARTING for whole gangs that fit, FAILED for those that never can, a stated reason for the rest.

All decisions of a pass are made on one look at store and cluster, and written in a few transactions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sqlalchemy.orm import Session

from orchestrator.errors import LauncherUnavailable, StaleWrite
from orchestrator.launcher_api import Resources
from orchestrator.quota import Quota, Usage
from orchestrator.reconcile.context import Context
from orchestrator.reconcile.decide import demand_of
from orchestrator.reconcile.queueing import Admission, Waiting, WaitReason, decide_admissions
from orchestrator.store.attempts import last_attempts, new_attempt
from orchestrator.store.jobs import JobLine, conditions_noted, job_lines
from orchestrator.store.kernels import breaker_rows, policy_for
from orchestrator.store.quotas import quotas_for
from orchestrator.store.swaps import swaps_of
from orchestrator.store.transitions import Note, change_state, note_all, set_condition
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["CONDITION", "admit_queued", "usage_by_project"]

CONDITION = "Admitted"
_BATCH = 200
"""Jobs that are written in one transaction: others may write between two."""
_SHOWN = 50
"""Of so many at the head of the queue a message is written anew when only its figures have changed."""
_HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a spec asks for."""

    project: str
    priority: int
    worker: Resources
    workers: int


@lru_cache(maxsize=8192)
def _asked(spec_json: str) -> _Asked:
    spec = JobSpec.model_validate_json(spec_json)
    return _Asked(spec.project, spec.priority, demand_of(spec), spec.world_size)


@dataclass(frozen=True, slots=True)
class _Queue:
    """One look at the store."""

    jobs: Sequence[JobLine]
    noted: Mapping[str, tuple[str, str]]
    planned_bytes: Mapping[str, float]
    reserved: Resources
    quotas: Mapping[str, Quota]
    used: Mapping[str, Usage]
    making_room: bool


def admit_queued(context: Context) -> int:
    """Decide about every job in the queue; return how many started."""
    with context.database.read() as session:
        queue = _look(session)
    if not queue.jobs:
        return 0
    try:
        capacity = context.launcher.capacity()
    except LauncherUnavailable as error:
        unknown = [Admission(job_id=job.id, message=str(error)) for job in queue.jobs]
        return _write(context, queue, unknown)
    now = context.clock()
    waiting = [_waiting(job, queue, now) for job in queue.jobs]
    decisions = decide_admissions(
        waiting, capacity, queue.reserved, quotas=queue.quotas, used=queue.used, making_room=queue.making_room
    )
    return _write(context, queue, _spared(context, decisions))


def _spared(context: Context, decisions: Sequence[Admission]) -> list[Admission]:
    """Let a job that had room once wait for it to come back: what a lost node leaves is not all that there will be."""
    refused = [decision.job_id for decision in decisions if decision.errors]
    if not refused:
        return list(decisions)
    with context.database.read() as session:
        ran_before = last_attempts(session, refused).keys()
    return [_waits(decision) if decision.job_id in ran_before else decision for decision in decisions]


def _waits(refused: Admission) -> Admission:
    text = "; ".join(error.message for error in refused.errors)
    return Admission(job_id=refused.job_id, reason=WaitReason.CAPACITY, message=text)


def usage_by_project(session: Session) -> dict[str, Usage]:
    """Return what the jobs of each project hold or were promised."""
    return _usage(job_lines(session, *_HOLDING))


def _usage(holding: Sequence[JobLine]) -> dict[str, Usage]:
    used: dict[str, Usage] = {}
    for job in holding:
        asked = _asked(job.spec)
        used[asked.project] = used.get(asked.project, Usage()).plus(asked.worker.times(asked.workers))
    return used


def _look(session: Session) -> _Queue:
    jobs = job_lines(session, JobState.QUEUED)
    holding = job_lines(session, *_HOLDING) if jobs else ()
    return _Queue(
        jobs=jobs,
        noted=conditions_noted(session, CONDITION, JobState.QUEUED) if jobs else {},
        planned_bytes={job.id: float(job.planned_bytes or 0) for job in jobs},
        reserved=_reserved(session, [job for job in holding if job.state == JobState.STARTING]),
        quotas=quotas_for(session, {_asked(job.spec).project for job in jobs}),
        used=_usage(holding),
        making_room=any(job.state == JobState.STOPPING and job.reason == Reason.PREEMPTED for job in holding),
    )


def _waiting(job: JobLine, queue: _Queue, now: float) -> Waiting:
    asked = _asked(job.spec)
    return Waiting(
        job_id=job.id,
        worker=asked.worker,
        workers=asked.workers,
        waited_s=now - job.state_since,
        project=asked.project,
        priority=asked.priority,
        planned_bytes=queue.planned_bytes[job.id],
    )


def _reserved(session: Session, starting: Sequence[JobLine]) -> Resources:
    """What jobs will take that have started and do not hold their resources yet."""
    attempts = last_attempts(session, [job.id for job in starting])
    total = Resources()
    for job in starting:
        if job.id in attempts and attempts[job.id].placed_at is None:
            asked = _asked(job.spec)
            total += asked.worker.times(asked.workers)
    return total


def _write(context: Context, queue: _Queue, decisions: Sequence[Admission]) -> int:
    started, changed = 0, False
    due = [
        (job, decision)
        for place, (job, decision) in enumerate(zip(queue.jobs, decisions, strict=True))
        if _is_news(decision, queue.noted.get(job.id), place)
    ]
    moving = [(job, decision) for job, decision in due if decision.start or decision.errors]
    for begin in range(0, len(moving), _BATCH):
        with context.database.write() as session:
            done = [_apply(session, context, job, decision) for job, decision in moving[begin : begin + _BATCH]]
        started += sum(moved and found.start for moved, (_, found) in zip(done, moving[begin:], strict=False))
        changed |= any(done)
    notes = [_note(job, decision) for job, decision in due if not (decision.start or decision.errors)]
    for begin in range(0, len(notes), _BATCH):
        with context.database.write() as session:
            changed |= note_all(session, CONDITION, notes[begin : begin + _BATCH], now=context.clock())
    if changed:
        context.changed()
    return started


def _is_news(decision: Admission, noted: tuple[str, str] | None, place: int) -> bool:
    if decision.start or decision.errors or noted is None:
        return True
    _, reason = _status(decision)
    return noted[0] != reason or (place < _SHOWN and noted[1] != decision.message)


def _status(decision: Admission) -> tuple[str, str]:
    return ("Unknown", "launcher_unavailable") if decision.reason is None else ("False", str(decision.reason))


def _note(job: JobLine, decision: Admission) -> Note:
    status, reason = _status(decision)
    return Note(job_id=job.id, version=job.version, status=status, reason=reason, message=decision.message)


def _apply(session: Session, context: Context, job: JobLine, decision: Admission) -> bool:
    """Start or refuse a job; False when it was cancelled or paused meanwhile, and nothing was written."""
    try:
        if decision.errors:
            _refuse(session, context, job, decision)
        else:
            _start(session, context, job)
    except StaleWrite:
        return False
    return True


def _start(session: Session, context: Context, job: JobLine) -> None:
    now = context.clock()
    row = change_state(session, job.id, JobState.STARTING, guard=context.guard(job), now=now)
    policy = policy_for(breaker_rows(session), swaps_of(session, job.id), job.id)
    attempt = new_attempt(session, row, now=now, epoch=policy.epoch)
    set_condition(session, row, CONDITION, "True", "admitted", f"attempt {attempt.number} starts", now=now)


def _refuse(session: Session, context: Context, job: JobLine, decision: Admission) -> None:
    change_state(
        session,
        job.id,
        JobState.FAILED,
        guard=context.guard(job),
        now=context.clock(),
        reason=Reason.INFEASIBLE,
        message="; ".join(error.message for error in decision.errors),
        errors=decision.errors,
    )
