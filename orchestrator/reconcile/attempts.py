"""Driving one attempt: launch it, store what its supervisor says, and carry out what follows from that.

To attach again after a restart is nothing special: the next poll continues at the stored cursor.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from orchestrator.errors import LauncherUnavailable, StaleWrite, StartFailed, SupervisorGone
from orchestrator.launcher_api import AttemptRef
from orchestrator.reconcile.context import Context
from orchestrator.reconcile.decide import AttemptAction, AttemptView, End, Force, decide_attempt, decide_force
from orchestrator.reconcile.succession import move_on
from orchestrator.reconcile.verify import decide_routes_verified
from orchestrator.store.attempts import (
    append_batch,
    attempt_by_id,
    last_attempt,
    numbers_of,
    reports_at,
    totals_of,
)
from orchestrator.store.jobs import events_of_kinds, find_job, plan_of
from orchestrator.store.kernels import breaker_rows, policy_for
from orchestrator.store.models import Attempt, Job
from orchestrator.store.swaps import close_swaps, swaps_of
from orchestrator.store.transitions import Value, add_event, change_state, locked_job, set_condition
from worker.contract.kernels import KernelPolicy
from worker.contract.messages import AttemptStart, PollBatch, StopRequest
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["POLL_LIMIT", "drive_attempt"]

POLL_LIMIT = 2000
_ROUNDS = 4
"""Moves in one pass: an attempt that has ended goes through STOPPING to its end in one go."""
_EMPTY = PollBatch(entries=(), dropped=0, alive_ranks=0, ended=False)


@dataclass(frozen=True, slots=True)
class _Seen:
    job: Job
    attempt: Attempt
    spec: JobSpec
    policy: KernelPolicy

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(self.job.id, self.attempt.number, self.attempt.fence)


@dataclass(frozen=True, slots=True)
class _Heard:
    """What asking the supervisor gave."""

    batch: PollBatch = _EMPTY
    gone: bool = False
    remains: tuple[str, ...] = ()


def drive_attempt(context: Context, job_id: str) -> None:
    """Do all that can be done now about a job in STARTING, RUNNING or STOPPING."""
    for _ in range(_ROUNDS):
        with context.database.read() as session:
            seen = _look(session, job_id)
        if seen is None:
            return
        try:
            if not _advance(context, seen):
                return
        except LauncherUnavailable as error:
            _go_on_unheard(context, seen, str(error))
            return
        except StaleWrite:
            continue  # somebody cancelled: look again


def _look(session: Session, job_id: str) -> _Seen | None:
    job = find_job(session, job_id)
    attempt = last_attempt(session, job_id)
    if attempt is None or JobState(job.state) not in (JobState.STARTING, JobState.RUNNING, JobState.STOPPING):
        return None
    spec = JobSpec.model_validate_json(job.spec)
    return _Seen(job, attempt, spec, policy_for(breaker_rows(session), swaps_of(session, job_id), job_id))


def _advance(context: Context, seen: _Seen) -> bool:
    """Make one move; True when there may be another at once."""
    if seen.job.state == JobState.STARTING and seen.attempt.launched_at is None:
        try:
            _launch(context, seen)
        except StartFailed as error:
            _stop(context, seen, End(reason=Reason.SETUP_FAILED, message=error.detail))
            return True
        except SupervisorGone as error:
            _stop(context, seen, End(reason=Reason.WORKER_LOST, message=error.detail))
            return True
    heard = _hear(context, seen)
    action, end, more = _store(context, seen, heard)
    if action is AttemptAction.SEND_STOP and end is not None:
        _send_stop(context, seen, end)
    elif action is AttemptAction.FINISH and end is not None:
        _finish(context, seen, end, gone=heard.gone)
    elif not heard.gone:
        _send_policy(context, seen)
    return more or action in (AttemptAction.RUN, AttemptAction.STOP)


def _launch(context: Context, seen: _Seen) -> None:
    place = "" if context.checkpoints is None else str(context.checkpoints.absolute() / seen.job.id)
    start = AttemptStart(
        job_id=seen.job.id,
        attempt=seen.attempt.number,
        fence=seen.attempt.fence,
        spec_json=seen.job.spec,
        plan_hash=seen.job.plan_hash or "",
        kernels=seen.policy,
        checkpoint_directory=place,
        report_directory="" if context.reports is None else str(context.reports.folder(seen.job.id).absolute()),
        log_directory="" if context.logs is None else str(context.logs.folder(seen.job.id).absolute()),
        log_quota_bytes=0 if context.logs is None else context.logs.quota_bytes,
        placement_deadline_s=min(60.0, seen.spec.failure.start_deadline_s),
    )
    context.launcher.start_attempt(start)
    with context.database.write() as session:
        row = attempt_by_id(session, seen.attempt.id)
        row.launched_at, row.epoch_sent = context.clock(), seen.policy.epoch


def _hear(context: Context, seen: _Seen) -> _Heard:
    if seen.attempt.ended_at is not None:
        return _Heard()  # its last entry is stored
    try:
        return _Heard(context.launcher.poll(seen.ref, seen.attempt.cursor, POLL_LIMIT))
    except SupervisorGone:
        return _hear_from_disk(context, seen)


def _hear_from_disk(context: Context, seen: _Seen) -> _Heard:
    """Read what a dead supervisor had not handed over, once nobody is left who could tell more."""
    job_id, number, size = seen.job.id, seen.attempt.number, seen.spec.world_size
    remains = context.launcher.remains(seen.ref)
    if context.reports is None:
        return _Heard(gone=True, remains=remains)
    remains += context.reports.alive(job_id, number, size)
    if remains:
        return _Heard(gone=True, remains=remains)
    numbers = numbers_of(seen.attempt)
    untold = context.reports.untold(job_id, number, size, after=seen.attempt.cursor, numbers=numbers)
    return _Heard(PollBatch(entries=untold, dropped=0, alive_ranks=0, ended=False), gone=True)


def _store(context: Context, seen: _Seen, heard: _Heard) -> tuple[AttemptAction, End | None, bool]:
    """Store what was heard and decide on it, in one transaction. The last value says that more may be waiting."""
    now = context.clock()
    with context.database.write() as session:
        job, attempt = locked_job(session, seen.job.id), attempt_by_id(session, seen.attempt.id)
        number = append_batch(session, job, attempt, heard.batch)
        if not heard.gone:
            set_condition(session, job, "Reachable", "True", "polled", "the supervisor answers", now=now)
        if number:
            _verify(session, job, attempt, now)
        action, end = decide_attempt(_view(job, attempt, seen.spec, heard, now))
        if action is AttemptAction.RUN:
            change_state(session, job.id, JobState.RUNNING, guard=context.guard(job), now=now)
        elif action is AttemptAction.STOP and end is not None:
            _record_end(session, context, job, end, now)
    if number or action is not AttemptAction.NOTHING:
        context.changed()
    return action, end, number >= POLL_LIMIT


def _view(job: Job, attempt: Attempt, spec: JobSpec, heard: _Heard, now: float) -> AttemptView:
    state = JobState(job.state)
    intended = job.reason if state is JobState.STOPPING else None
    return AttemptView(
        state=state,
        now=now,
        deadline_at=attempt.created_at + spec.failure.start_deadline_s,
        formed=attempt.formed_at is not None,
        intended=_end(intended, job.message),
        reported=_end(attempt.end_reason, attempt.end_message),
        gone=heard.gone,
        remains=heard.remains,
        stop_sent_at=attempt.stop_sent_at,
    )


def _end(reason: str | None, message: str | None) -> End | None:
    return None if reason is None else End(reason=Reason(reason), message=message or "")


def _verify(session: Session, job: Job, attempt: Attempt, now: float) -> None:
    """Compare with the plan at the newest step that every rank has reported."""
    plan, totals = plan_of(session, job), totals_of(session, [attempt.id]).get(attempt.id, {})
    if plan is None or len(totals) < plan.world_size:
        return
    step = min(report.step for report in totals.values())
    verdict = decide_routes_verified(plan, reports_at(session, attempt.id, step))
    if verdict is None:
        return  # a rank's report of this step was dropped: a later step will do
    data: dict[str, Value] = {
        "attempt": attempt.number,
        "step": verdict.step,
        "skipped": verdict.skipped,
        "matrices": verdict.matrices,
        "planned_matrices": verdict.planned_matrices,
        "payload_bytes": verdict.payload_bytes,
        "planned_bytes": verdict.planned_bytes,
    }
    status, reason = ("True", "as_planned") if verdict.verified else ("False", "differs_from_plan")
    changed = set_condition(session, job, "RoutesVerified", status, reason, str(verdict), now=now, data=data)
    if changed and not verdict.verified:
        add_event(session, job, "alarm", str(verdict), now=now, data=data)


def _record_end(session: Session, context: Context, job: Job, end: End, now: float) -> None:
    guard = context.guard(job)
    change_state(session, job.id, JobState.STOPPING, guard=guard, now=now, reason=end.reason, message=end.message)


def _stop(context: Context, seen: _Seen, end: End) -> None:
    with context.database.write() as session:
        _record_end(session, context, seen.job, end, context.clock())
    context.changed()


def _send_stop(context: Context, seen: _Seen, end: End) -> None:
    patience_s = seen.spec.failure.stop_patience_s
    context.launcher.stop(seen.ref, StopRequest(reason=end.reason, message=end.message, patience_s=patience_s))
    with context.database.write() as session:
        attempt_by_id(session, seen.attempt.id).stop_sent_at = context.clock()


def _finish(context: Context, seen: _Seen, end: End, *, gone: bool) -> None:
    if not gone:
        # It may have left before: a control plane can end between asking it and writing that down.
        with contextlib.suppress(SupervisorGone):
            context.launcher.leave(seen.ref)
        if context.launcher.remains(seen.ref):
            return  # the supervisor is still leaving: the next pass looks again
    now = context.clock()
    with context.database.write() as session:
        attempt = attempt_by_id(session, seen.attempt.id)
        if attempt.ended_at is None:
            attempt.ended_at, attempt.end_reason, attempt.end_message = now, end.reason, end.message
        close_swaps(session, locked_job(session, seen.job.id), end.message, now=now)
        move_on(session, context.guard(seen.job), seen.job.id, end, now=now)
    if context.reports is not None:
        context.reports.remove(seen.job.id, seen.attempt.number)
    context.changed()


def _send_policy(context: Context, seen: _Seen) -> None:
    """Bring a job up to the newest word on its kernels."""
    if seen.policy.epoch <= seen.attempt.epoch_sent or seen.job.state == JobState.STOPPING:
        return
    try:
        context.launcher.set_kernels(seen.ref, seen.policy)
    except SupervisorGone:
        return  # the next poll finds the same and acts on it
    with context.database.write() as session:
        job = locked_job(session, seen.job.id)
        attempt_by_id(session, seen.attempt.id).epoch_sent = seen.policy.epoch
        tripped = ", ".join(sorted(seen.policy.tripped)) or "none"
        message = f"kernel policy {seen.policy.epoch} was handed to attempt {seen.attempt.number}; tripped: {tripped}"
        message += "" if seen.policy.swap is None else f"; swap to {seen.policy.swap.target}"
        data: dict[str, Value] = {"epoch": seen.policy.epoch, "tripped": tripped}
        add_event(session, job, "kernels_sent", message, now=context.clock(), data=data)
    context.changed()


def _go_on_unheard(context: Context, seen: _Seen, why: str) -> None:
    """Note that the supervisor cannot be asked, and end its attempt where that is due all the same."""
    job, stopping_s = seen.job, context.clock() - seen.job.state_since
    with context.database.read() as session:
        told = events_of_kinds(session, job.id, ("checkpoint_saved",), 1)
    saved = any(_is_left(Path(json.loads(row.data).get("path", ""))) for row in told)
    patience_s = seen.spec.failure.stop_patience_s
    force = decide_force(JobState(job.state), job.reason, stopping_s, patience_s, saved=saved)
    if force is Force.KEEP:
        why += (
            f"; it was to stop ({job.reason}) and is not ended by force, because it has no checkpoint and would lose "
            f"all its steps. It stops when its supervisor answers; 'dmuonctl cancel {job.id}' ends it at once"
        )
    _note_reachable(context, seen, "Unknown", "nothing_saved" if force is Force.KEEP else "launcher_unavailable", why)
    if force is Force.END:
        _end_by_force(context, seen)


def _is_left(checkpoint: Path) -> bool:
    """Tell whether a checkpoint that was told, or a later one that took its place untold, is where it was put.

    True too where this machine does not see that folder. A directory of that name is complete: it was renamed to it.
    """
    folder = checkpoint.parent
    return not folder.is_dir() or any(folder.glob("step-*"))


def _end_by_force(context: Context, seen: _Seen) -> None:
    """End an attempt whose supervisor does not answer: what it told is read from disk afterwards."""
    try:
        context.launcher.kill(seen.ref)
    except (LauncherUnavailable, SupervisorGone):
        return  # the next pass sees which of the two it is, and acts on it
    message = f"attempt {seen.attempt.number} was ended by force: it was to end ({seen.job.reason}) and its supervisor "
    message += "does not answer; a job that goes on does so from its newest checkpoint"
    with context.database.write() as session:
        job = locked_job(session, seen.job.id)
        add_event(session, job, "ended_by_force", message, now=context.clock(), data={"attempt": seen.attempt.number})
    context.changed()


def _note_reachable(context: Context, seen: _Seen, status: str, reason: str, message: str) -> None:
    with context.database.write() as session:
        job = locked_job(session, seen.job.id)
        changed = set_condition(session, job, "Reachable", status, reason, message, now=context.clock())
    if changed:
        context.changed()
