"""Kernel swaps, and the breakers that moved by themselves: what was asked for, and what the ranks told of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from orchestrator.errors import JobFinished, KernelsAbsent, NotFound, SwapImpossible
from orchestrator.store.models import Attempt, BreakerTransition, Job, KernelSwap, RuntimeTransition
from orchestrator.store.transitions import Value, add_event, locked_job
from worker.contract.kernels import BreakerState, Kernel, KernelTarget, SwapOrder, SwapState
from worker.contract.messages import Milestone
from worker.contract.spec import JobSpec
from worker.contract.states import JobState

__all__ = [
    "close_swaps", "find_swap", "next_number", "note_milestone", "order_of", "refuse_baseline", "request_swap",
    "runtime_counts", "runtime_rows", "runtime_states", "swap_counts", "swaps_of", "target_of", "trains_with",
]  # fmt: skip

_STATES = {
    "swap_preparing": SwapState.PREPARING,
    "swap_prepared": SwapState.PREPARED,
    "swap_committed": SwapState.COMMITTED,
    "swap_rolled_back": SwapState.ROLLED_BACK,
}
_ACTIVE = tuple(state for state in SwapState if not state.final)
_BY_WEIGHT = (BreakerState.OPEN, BreakerState.HALF_OPEN)
"""What counts for a kernel of whose breakers some moved: the first that any is in."""


def next_number(session: Session) -> int:
    """Return the number of the next word on kernels, a breaker's or a swap's."""
    epochs = session.scalar(select(func.max(BreakerTransition.epoch))) or 0
    return max(int(epochs), int(session.scalar(select(func.max(KernelSwap.number))) or 0)) + 1


def request_swap(
    session: Session, job_id: str, attempt: Attempt | None, target: KernelTarget, *, reason: str, actor: str, now: float
) -> KernelSwap:
    """Insert a swap in REQUESTED, with an event; the reconciler hands it to the job.

    Raises:
        NotFound: there is no such job.
        JobFinished: the job has ended.
        KernelsAbsent: it trains with a baseline.
        SwapImpossible: it does not train yet, or another swap of it is under way.
    """
    job = locked_job(session, job_id)
    state = JobState(job.state)
    if state.terminal:
        raise JobFinished(f"job {job_id} is {state}: its kernels launch nothing any more")
    refuse_baseline(job)
    if state is not JobState.RUNNING or attempt is None:
        raise SwapImpossible(f"job {job_id} is {state}; a kernel is swapped while a job is RUNNING. Ask again then.")
    spec = JobSpec.model_validate_json(job.spec)
    active = session.scalar(select(KernelSwap).where(KernelSwap.job_id == job_id, KernelSwap.state.in_(_ACTIVE)))
    if active is not None:
        raise SwapImpossible(f"swap {active.id} of job {job_id} is {active.state}; one goes on at a time. Wait for it.")
    row = KernelSwap(
        id=secrets.token_hex(5), job_id=job_id, number=next_number(session), attempt=attempt.number,
        target=target.model_dump_json(), state=SwapState.REQUESTED, reason=reason, actor=actor, requested_at=now,
        changed_at=now, deadline_s=spec.kernels.swap_deadline_s, message="",
    )  # fmt: skip
    session.add(row)
    data: dict[str, Value] = {"swap": row.id, "number": row.number, "actor": actor, "reason": reason}
    add_event(session, job, "swap_requested", f"{actor} asked for {target}: {reason}", now=now, data=data)
    return row


def trains_with(job: Job) -> str:
    """Return the kind of a job's optimizer: ``dmuon``, or a baseline."""
    return str(json.loads(job.spec)["optimizer"]["kind"])


def refuse_baseline(job: Job) -> None:
    """Refuse a word on the kernels of a job that launches none of them.

    Raises:
        KernelsAbsent: it trains with a baseline.
    """
    kind = trains_with(job)
    if kind != "dmuon":
        raise KernelsAbsent(
            f"job {job.id} trains with torch's own {kind} (optimizer.kind), whose kernels are torch's: tripping or "
            "swapping ours would change nothing. Jobs with optimizer.kind dmuon have kernels to operate."
        )


def swaps_of(session: Session, job_id: str) -> Sequence[KernelSwap]:
    """Return a job's swaps, oldest first."""
    return session.scalars(select(KernelSwap).where(KernelSwap.job_id == job_id).order_by(KernelSwap.number)).all()


def find_swap(session: Session, job_id: str, swap_id: str) -> KernelSwap:
    """Return one swap of a job.

    Raises:
        NotFound: the job has no such swap.
    """
    row = session.get(KernelSwap, swap_id)
    if row is None or row.job_id != job_id:
        raise NotFound(f"job {job_id} has no kernel swap {swap_id!r}")
    return row


def order_of(swaps: Sequence[KernelSwap]) -> SwapOrder | None:
    """Return what an attempt is to carry out now."""
    row = next((row for row in swaps if row.state in _ACTIVE), None)
    if row is None:
        return None
    target = KernelTarget.model_validate_json(row.target)
    return SwapOrder(number=row.number, target=target, deadline_s=row.deadline_s)


def target_of(swaps: Sequence[KernelSwap]) -> KernelTarget | None:
    """Return what all committed swaps came to; None before the first."""
    target: KernelTarget | None = None
    for row in swaps:
        if row.state == SwapState.COMMITTED:
            target = KernelTarget.model_validate_json(row.target).over(target)
    return target


def note_milestone(session: Session, job: Job, attempt: Attempt, body: Milestone) -> None:
    """Take in what a rank tells of swaps and breakers; other milestones are passed over."""
    if body.name == "breaker_changed":
        _note_transition(session, job, attempt, body)
    if not body.name.startswith("swap_"):
        return
    row = session.scalar(
        select(KernelSwap).where(KernelSwap.job_id == job.id, KernelSwap.number == body.data.get("swap"))
    )
    if row is None or SwapState(row.state).final:
        return
    if body.name == "swap_refused":
        row.message = "; ".join(filter(None, (row.message, body.message)))
        return
    row.state, row.changed_at = _STATES[body.name], body.at
    if body.name == "swap_prepared":
        row.epoch, row.step = int(body.data["epoch"] or 0), int(body.data["step"] or 0)
    row.message = "; ".join(filter(None, (row.message if body.name == "swap_rolled_back" else "", body.message)))


def _note_transition(session: Session, job: Job, attempt: Attempt, body: Milestone) -> None:
    data = body.data
    row = RuntimeTransition(
        job_id=job.id, attempt=attempt.number, kernel=str(data["kernel"]), size_class=int(data["size_class"] or 0),
        dtype=str(data["dtype"]), from_state=str(data["from"]), to_state=str(data["to"]), reason=str(data["reason"]),
        step=int(data["step"] or 0), at=body.at,
    )  # fmt: skip
    session.add(row)


def close_swaps(session: Session, job: Job, why: str, *, now: float) -> None:
    """End the swap whose attempt has ended; what ran before it runs in the next attempt."""
    query = select(KernelSwap).where(KernelSwap.job_id == job.id, KernelSwap.state.in_(_ACTIVE))
    for row in session.scalars(query).all():
        was, row.state, row.changed_at = row.state, SwapState.FAILED, now
        row.message = f"it was {was} when the attempt ended: {why}"
        data: dict[str, Value] = {"swap": row.id, "number": row.number}
        add_event(session, job, "swap_failed", f"swap {row.id} failed; {row.message}", now=now, data=data)


def runtime_rows(session: Session, job_id: str, attempt: int) -> Sequence[RuntimeTransition]:
    """Return the last move of each breaker of an attempt."""
    query = select(RuntimeTransition).where(RuntimeTransition.job_id == job_id, RuntimeTransition.attempt == attempt)
    last = {
        (row.kernel, row.size_class, row.dtype): row for row in session.scalars(query.order_by(RuntimeTransition.id))
    }
    return list(last.values())


def runtime_states(rows: Sequence[RuntimeTransition]) -> dict[Kernel, BreakerState]:
    """Return the state of each kernel of which some breaker is not closed."""
    found: dict[Kernel, BreakerState] = {}
    for state in reversed(_BY_WEIGHT):
        found |= {Kernel(row.kernel): state for row in rows if row.to_state == state}
    return found


def runtime_counts(session: Session) -> dict[tuple[str, str, str], int]:
    """Return how often breakers moved by themselves, by (kernel, from, to)."""
    columns = (RuntimeTransition.kernel, RuntimeTransition.from_state, RuntimeTransition.to_state)
    rows = session.execute(select(*columns, func.count()).group_by(*columns))
    return {(kernel, old, new): number for kernel, old, new, number in rows}


def swap_counts(session: Session) -> dict[str, int]:
    """Return how many swaps came to each end."""
    rows = session.execute(select(KernelSwap.state, func.count()).group_by(KernelSwap.state)).all()
    counted: dict[str, int] = {row[0]: row[1] for row in rows}
    return {state: counted.get(state, 0) for state in SwapState if state.final}
