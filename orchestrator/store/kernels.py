"""Breakers: the operator's word on each kernel, as rows, and the policy that follows for a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from orchestrator.errors import JobFinished
from orchestrator.store.jobs import LIVE, WAITING, jobs_in
from orchestrator.store.models import Breaker, BreakerTransition, Job, KernelSwap
from orchestrator.store.swaps import next_number, order_of, refuse_baseline, target_of, trains_with
from orchestrator.store.transitions import Value, add_event, locked_job
from worker.contract.kernels import FALLBACK_KERNEL, BreakerState, Kernel, KernelPolicy
from worker.contract.states import JobState

__all__ = [
    "ALL", "SWITCHABLE", "breaker_rows", "effective_states", "expire_breakers", "history", "policy_for", "set_breaker",
    "transition_counts", "version_of",
]  # fmt: skip

ALL = "all"
SWITCHABLE: tuple[Kernel, ...] = tuple(kernel for kernel in Kernel if kernel not in (Kernel.AUTO, FALLBACK_KERNEL))
"""Kernels that have a breaker."""
_TRIPPED = (BreakerState.OPEN, BreakerState.FORCED_OPEN)


def breaker_rows(session: Session) -> Sequence[Breaker]:
    """Return all rows."""
    return session.scalars(select(Breaker).order_by(Breaker.kernel, Breaker.scope)).all()


def effective_states(rows: Iterable[Breaker], job_id: str) -> dict[Kernel, BreakerState]:
    """Return each breaker's state for one job: its own row counts more than the row for all."""
    states: dict[Kernel, BreakerState] = dict.fromkeys(SWITCHABLE, BreakerState.CLOSED)
    for scope in (ALL, job_id):
        states |= {Kernel(row.kernel): BreakerState(row.state) for row in rows if row.scope == scope}
    return states


def policy_for(rows: Sequence[Breaker], swaps: Sequence[KernelSwap], job_id: str) -> KernelPolicy:
    """Return what a job may launch. Its epoch is that of the last word, on a breaker or a swap, which concerned it."""
    states = effective_states(rows, job_id)
    concerned = [row for row in rows if row.scope in (ALL, job_id)]
    resets = {Kernel(row.kernel): row.epoch for row in concerned if row.state == BreakerState.CLOSED}
    return KernelPolicy(
        epoch=max((*(row.epoch for row in concerned), *(row.number for row in swaps)), default=0),
        tripped=frozenset(kernel for kernel, state in states.items() if state in _TRIPPED),
        disabled=frozenset(kernel for kernel, state in states.items() if state is BreakerState.DISABLED),
        metrics_only=frozenset(kernel for kernel, state in states.items() if state is BreakerState.METRICS_ONLY),
        resets=resets,
        target=target_of(swaps),
        swap=order_of(swaps),
    )


def version_of(session: Session, kernel: Kernel) -> int:
    """Return the epoch of a kernel's last change, 0 before the first."""
    found = session.scalar(select(func.max(BreakerTransition.epoch)).where(BreakerTransition.kernel == kernel))
    return int(found or 0)


def set_breaker(
    session: Session,
    kernel: Kernel,
    state: BreakerState,
    *,
    scope: str,
    reason: str,
    actor: str,
    now: float,
    expires_at: float | None = None,
) -> int:
    """Set a breaker for all jobs or for one, with an event on every job that it concerns: a baseline is none.

    A word for all jobs replaces earlier words for single ones. At ``expires_at`` it is closed again.

    Returns:
        The new epoch.

    Raises:
        NotFound: ``scope`` names no job.
        JobFinished: it names one that ended.
        KernelsAbsent: it names one that trains with a baseline.
    """
    rows = breaker_rows(session)
    old = _state_in(rows, kernel, scope)
    epoch = next_number(session)
    affected = _affected(session, scope)
    if scope == ALL:
        session.execute(delete(Breaker).where(Breaker.kernel == kernel, Breaker.scope != ALL))
    row = session.get(Breaker, (kernel, scope)) or Breaker(kernel=kernel, scope=scope)
    row.state, row.reason, row.actor, row.changed_at, row.epoch = state, reason, actor, now, epoch
    row.expires_at = expires_at
    session.add(row)
    session.add(
        BreakerTransition(
            epoch=epoch, kernel=kernel, scope=scope, from_state=old, to_state=state, reason=reason, actor=actor, at=now
        )
    )
    message = f"{actor} set the breaker of {kernel} from {old} to {state}: {reason}"
    for job in affected:
        data: dict[str, Value] = {
            "kernel": str(kernel),
            "from": str(old),
            "to": str(state),
            "epoch": epoch,
            "actor": actor,
            "reason": reason,
        }
        add_event(session, locked_job(session, job.id), "breaker", message, now=now, data=data)
    return epoch


def expire_breakers(session: Session, *, now: float) -> int:
    """Close the breakers whose word has expired; return how many."""
    due = [row for row in breaker_rows(session) if row.expires_at is not None and row.expires_at <= now]
    for row in due:
        reason = f"{row.state} by {row.actor} ({row.reason}) has expired"
        try:
            set_breaker(
                session,
                Kernel(row.kernel),
                BreakerState.CLOSED,
                scope=row.scope,
                reason=reason,
                actor="expiry",
                now=now,
            )
        except JobFinished:
            session.delete(row)  # nobody is left whom it concerns
    return len(due)


def history(session: Session, kernel: Kernel, limit: int) -> Sequence[BreakerTransition]:
    """Return the last words on a kernel, newest first."""
    query = select(BreakerTransition).where(BreakerTransition.kernel == kernel)
    return session.scalars(query.order_by(BreakerTransition.epoch.desc()).limit(limit)).all()


def _state_in(rows: Iterable[Breaker], kernel: Kernel, scope: str) -> BreakerState:
    return effective_states([row for row in rows if row.kernel == kernel], scope)[kernel]


def _affected(session: Session, scope: str) -> Sequence[Job]:
    if scope == ALL:
        return [job for job in jobs_in(session, *WAITING, *LIVE) if trains_with(job) == "dmuon"]
    job = locked_job(session, scope)
    if JobState(job.state).terminal:
        raise JobFinished(f"job {scope} is {job.state}: its kernels launch nothing any more")
    refuse_baseline(job)
    return [job]


def transition_counts(session: Session) -> dict[tuple[str, str, str], int]:
    """Return how often breakers changed, by (kernel, from, to)."""
    columns = (BreakerTransition.kernel, BreakerTransition.from_state, BreakerTransition.to_state)
    rows = session.execute(select(*columns, func.count()).group_by(*columns))
    return {(kernel, old, new): number for kernel, old, new, number in rows}
