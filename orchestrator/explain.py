"""Why a job is where it is. Pure: what was recorded in, causes out, the one that matters most first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator import resources as r
from worker.contract.states import JobState, Reason

__all__ = ["Known", "explain"]

_SLOW_OVERLAP, _SLOW_IMBALANCE = 0.5, 1.5
"""Below this share of hidden communication, or above this ratio of largest to mean owner time, it is said."""
_CURES = {
    Reason.INFEASIBLE: "Ask for less, or add machines; then submit again.",
    Reason.PLAN_REFUSED: "Mend what the errors name; 'dmuonctl plan' checks it without submitting.",
    Reason.SETUP_FAILED: "Look at the errors of the ranks and at 'dmuonctl logs'.",
    Reason.USER_ERROR: "Look at the errors of the ranks and at 'dmuonctl logs'; it is not retried.",
    Reason.NON_FINITE: "Lower the learning rate or clip gradients, or set /failure/non_finite to skip.",
    Reason.WORKER_LOST: "Nothing in the spec is wrong; memory of the machine is the commonest cause.",
    Reason.STALLED: "Look at the stacks in the events: they name the rank and the phase.",
    Reason.INTERNAL: "This is a fault of the service; its log says more.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What was recorded about a job."""

    job: r.JobResource
    ahead: int | None = None
    """Jobs before it in the queue."""
    alarms: Sequence[r.EventResource] = ()
    """Alarms and stalls, oldest first."""
    imbalance: float | None = None
    """Largest measured owner time over the mean."""
    fallback_kernels: Sequence[str] = field(default_factory=tuple)
    """Kernels whose breaker keeps them from running."""


def explain(known: Known) -> r.Explanation:
    """Return why the job is in its state."""
    job = known.job
    causes = [*_end(job), *_waiting(job), *_restarts(job), *_slow(known), *_unknown(job)]
    causes += [r.Cause(code=event.kind, message=event.message, since=event.at) for event in list(known.alarms)[-3:]]
    summary = causes[0].message if causes else f"the job is {job.state}, and nothing is known to be wrong"
    return r.Explanation(
        job=job.id, state=job.state, since=job.state_since, summary=summary, causes=tuple(causes), ahead=known.ahead
    )


def _end(job: r.JobResource) -> list[r.Cause]:
    if job.reason is None:
        return []
    reason = Reason(job.reason) if job.reason in set(Reason) else None
    cure = _CURES.get(reason, "") if reason is not None else ""
    blame = "" if job.blame in (None, "nobody") else f" (at fault: {job.blame})"
    text = job.message or str(job.reason)
    causes = [r.Cause(code=job.reason, message=f"{text}{blame}", since=job.finished_at or job.state_since, cure=cure)]
    causes += [
        r.Cause(code=error.code, message=f"{error.pointer or '/'}: {error.message}", cure=error.suggestion or "")
        for error in job.errors
    ]
    last = job.attempts[-1].number if job.attempts else 0
    for group in job.rank_errors:
        if group.attempt == last:
            ranks = ", ".join(str(rank) for rank in group.ranks)
            causes.append(r.Cause(code="rank_error", message=f"rank {ranks}: {group.type}: {group.message}"))
    return causes


def _waiting(job: r.JobResource) -> list[r.Cause]:
    """While nothing runs: the newest condition that is not True."""
    if job.state not in (JobState.SUBMITTED, JobState.QUEUED, JobState.STARTING, JobState.RESTARTING):
        return []
    open_ones = [row for row in job.conditions if row.status != "True" and row.type != "Reachable"]
    found = [
        r.Cause(code=row.reason, message=row.message, since=row.since)
        for row in sorted(open_ones, key=lambda row: -row.since)
    ]
    if not found:
        texts = {
            JobState.SUBMITTED: ("planning", "its plan is being made"),
            JobState.QUEUED: ("not_looked_at", "it was queued, and the next pass of the reconciler decides about it"),
            JobState.STARTING: ("starting", "its workers are being started and join the process group"),
            JobState.RESTARTING: ("backoff", "it waits before its next attempt"),
        }
        code, text = texts[JobState(job.state)]
        found = [r.Cause(code=code, message=job.message or text, since=job.state_since)]
    return found


def _restarts(job: r.JobResource) -> list[r.Cause]:
    ended = [attempt for attempt in job.attempts[:-1] if attempt.end_reason is not None]
    return [
        r.Cause(
            code=f"attempt_{attempt.end_reason}",
            message=f"attempt {attempt.number} ended as {attempt.end_reason}: {attempt.end_message}",
            since=attempt.ended_at,
        )
        for attempt in ended
    ]


def _slow(known: Known) -> list[r.Cause]:
    if known.job.state != JobState.RUNNING:
        return []
    found, overlap = [], known.job.progress.overlap_ratio
    if overlap is not None and overlap < _SLOW_OVERLAP:
        text = f"only {100 * overlap:.0f} % of the communication is hidden behind compute"
        cure = "See 'routes' for which route; larger micro batches or Z2 leave more compute to hide it behind."
        found.append(r.Cause(code="exposed_communication", message=text, cure=cure))
    if known.imbalance is not None and known.imbalance > _SLOW_IMBALANCE:
        text = f"the busiest owner works {known.imbalance:.2f} times as long as the mean"
        found.append(
            r.Cause(code="owner_imbalance", message=text, cure="See 'routes' for planned and measured shares.")
        )
    for kernel in known.fallback_kernels:
        text = f"the breaker of kernel {kernel} keeps it from running; the fallback runs"
        cure = f"'dmuonctl kernels' says why; 'reset' lets {kernel} run again."
        found.append(r.Cause(code="kernel_fallback", message=text, cure=cure))
    return found


def _unknown(job: r.JobResource) -> list[r.Cause]:
    return [
        r.Cause(
            code=row.reason,
            message=f"whether it runs is not known: {row.message}; that alone changes nothing about it",
            since=row.since,
        )
        for row in job.conditions
        if row.type == "Reachable" and row.status == "Unknown" and job.finished_at is None
    ]
