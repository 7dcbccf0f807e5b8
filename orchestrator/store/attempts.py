"""Attempts and what their supervisors report. Appending is idempotent: by cursor, by sequence, by the ranks' own
numbers and by (step, rank)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session, aliased

from orchestrator.store.models import Attempt, Job, RankErrorRow, RankReportRow, RankTotals
from orchestrator.store.swaps import close_swaps, note_milestone
from orchestrator.store.transitions import add_event
from worker.contract.errors import ErrorValue
from worker.contract.messages import AttemptEnd, Entry, Milestone, PollBatch, RankError, RankReport

__all__ = [
    "append_batch", "attempt_by_id", "attempts_of", "count_restarts", "errors_of", "last_attempt", "last_attempts",
    "new_attempt", "numbers_of", "reports_at", "reports_of_steps", "totals_of",
]  # fmt: skip


def new_attempt(session: Session, job: Job, *, now: float, epoch: int) -> Attempt:
    """Insert the next attempt of a job, with a fresh fence; ``epoch`` is that of the kernel policy it starts with."""
    before = last_attempt(session, job.id)
    row = Attempt(
        job_id=job.id,
        number=1 if before is None else before.number + 1,
        fence=secrets.token_hex(16),
        created_at=now,
        cursor=0,
        dropped=0,
        alive_ranks=0,
        epoch_sent=epoch,
    )
    session.add(row)
    session.flush()
    if job.queue_wait_s is None:
        job.queue_wait_s = now - job.created_at
    return row


def last_attempt(session: Session, job_id: str) -> Attempt | None:
    """Return the newest attempt of a job; None before the first."""
    query = select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number.desc()).limit(1)
    return session.scalar(query)


def last_attempts(session: Session, job_ids: Sequence[str]) -> dict[str, Attempt]:
    """Return the newest attempt of each job that has any."""
    rows = session.scalars(select(Attempt).where(Attempt.job_id.in_(job_ids)).order_by(Attempt.number))
    return {row.job_id: row for row in rows}


def attempts_of(session: Session, job_id: str) -> Sequence[Attempt]:
    """Return a job's attempts, oldest first."""
    return session.scalars(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.number)).all()


def count_restarts(session: Session) -> dict[str, int]:
    """Return how many attempts followed another one, by the reason for which that one ended."""
    following = aliased(Attempt)
    pairs = (following.job_id == Attempt.job_id) & (following.number == Attempt.number + 1)
    query = select(Attempt.end_reason, func.count()).join(following, pairs).group_by(Attempt.end_reason)
    return {str(reason): number for reason, number in session.execute(query)}


def attempt_by_id(session: Session, attempt_id: int) -> Attempt:
    """Return the row, locked until the transaction ends."""
    return session.scalars(select(Attempt).where(Attempt.id == attempt_id).with_for_update()).one()


def append_batch(session: Session, job: Job, attempt: Attempt, batch: PollBatch) -> int:
    """Store what a poll returned and move the cursor; entries that were stored before are passed over.

    Returns:
        The number of new entries.
    """
    numbers = numbers_of(attempt)
    fresh = [entry for entry in batch.entries if entry.seq > attempt.cursor and _is_new(entry, numbers)]
    _append_reports(session, attempt, fresh)
    for entry in fresh:
        body = entry.body
        if isinstance(body, Milestone):
            _append_milestone(session, job, attempt, body)
        elif isinstance(body, RankError):
            session.add(RankErrorRow(attempt_id=attempt.id, seq=entry.seq, body=body.error.model_dump_json()))
            add_event(session, job, "rank_error", str(body.error), now=body.at, data={"rank": body.error.rank})
        elif isinstance(body, AttemptEnd):
            attempt.ended_at, attempt.end_reason, attempt.end_message = body.at, body.reason, body.message
            add_event(session, job, "attempt_end", body.message, now=body.at, data={"reason": body.reason})
            close_swaps(session, job, body.message, now=body.at)
    for entry in fresh:
        if entry.rank is not None and entry.number is not None:
            numbers[entry.rank] = max(numbers.get(entry.rank, 0), entry.number)
    attempt.rank_numbers = json.dumps(numbers)
    attempt.cursor = max([attempt.cursor, *(entry.seq for entry in batch.entries)])
    attempt.dropped = max(attempt.dropped, batch.dropped)
    attempt.alive_ranks = batch.alive_ranks
    return len(fresh)


def numbers_of(attempt: Attempt) -> dict[int, int]:
    """Return, by rank, the last of its own numbers that was stored."""
    return {int(rank): int(number) for rank, number in json.loads(attempt.rank_numbers).items()}


def _is_new(entry: Entry, numbers: Mapping[int, int]) -> bool:
    return entry.rank is None or entry.number is None or entry.number > numbers.get(entry.rank, 0)


def _append_milestone(session: Session, job: Job, attempt: Attempt, body: Milestone) -> None:
    if body.name == "placed":
        attempt.placed_at = attempt.placed_at or body.at
    elif body.name == "group_formed":
        attempt.formed_at = attempt.formed_at or body.at
    note_milestone(session, job, attempt, body)
    data = {**body.data, "attempt": attempt.number, "rank": body.rank}
    add_event(session, job, body.name, body.message, now=body.at, data=data)


def _append_reports(session: Session, attempt: Attempt, fresh: Iterable[Entry]) -> None:
    found = {(e.body.step, e.body.rank): (e.seq, e.body) for e in fresh if isinstance(e.body, RankReport)}
    if not found:
        return
    steps = {step for step, _ in found}
    known = session.execute(
        select(RankReportRow.step, RankReportRow.rank).where(
            RankReportRow.attempt_id == attempt.id, RankReportRow.step.between(min(steps), max(steps))
        )
    )
    for step, rank in known.all():
        found.pop((step, rank), None)
    rows = [
        {"attempt_id": attempt.id, "step": step, "rank": rank, "seq": seq, "body": body.model_dump_json()}
        for (step, rank), (seq, body) in found.items()
    ]
    if rows:
        session.execute(insert(RankReportRow), rows)
    newest: dict[int, RankReport] = {}
    for (_, rank), (_, body) in sorted(found.items()):
        newest[rank] = body
    for rank, body in newest.items():
        _raise_totals(session, attempt, rank, body)


def _raise_totals(session: Session, attempt: Attempt, rank: int, body: RankReport) -> None:
    row = session.get(RankTotals, (attempt.id, rank))
    if row is None:
        session.add(RankTotals(attempt_id=attempt.id, rank=rank, step=body.step, body=body.model_dump_json()))
    elif row.step < body.step:
        row.step, row.body = body.step, body.model_dump_json()


def totals_of(session: Session, attempt_ids: Iterable[int]) -> dict[int, dict[int, RankReport]]:
    """Return the last report of every rank, by attempt and rank."""
    wanted = list(attempt_ids)
    rows = session.scalars(select(RankTotals).where(RankTotals.attempt_id.in_(wanted))) if wanted else ()
    found: dict[int, dict[int, RankReport]] = {}
    for row in rows:
        found.setdefault(row.attempt_id, {})[row.rank] = RankReport.model_validate_json(row.body)
    return found


def reports_at(session: Session, attempt_id: int, step: int) -> list[RankReport]:
    """Return the reports of all ranks for one step."""
    query = select(RankReportRow.body).where(RankReportRow.attempt_id == attempt_id, RankReportRow.step == step)
    return [RankReport.model_validate_json(body) for body in session.scalars(query)]


def reports_of_steps(session: Session, attempt_id: int, after: int, limit: int) -> dict[int, list[RankReport]]:
    """Return the reports of up to ``limit`` steps that follow step ``after``, by step."""
    steps = (
        select(RankReportRow.step)
        .where(RankReportRow.attempt_id == attempt_id, RankReportRow.step > after)
        .distinct()
        .order_by(RankReportRow.step)
        .limit(limit)
    )
    query = (
        select(RankReportRow.step, RankReportRow.body)
        .where(RankReportRow.attempt_id == attempt_id, RankReportRow.step.in_(steps.scalar_subquery()))
        .order_by(RankReportRow.step, RankReportRow.rank)
    )
    found: dict[int, list[RankReport]] = {}
    for step, body in session.execute(query):
        found.setdefault(step, []).append(RankReport.model_validate_json(body))
    return found


def errors_of(session: Session, attempt_ids: Iterable[int]) -> list[tuple[int, ErrorValue]]:
    """Return every rank's error as (attempt id, error), in the order in which they came."""
    wanted = list(attempt_ids)
    if not wanted:
        return []
    query = (
        select(RankErrorRow)
        .where(RankErrorRow.attempt_id.in_(wanted))
        .order_by(RankErrorRow.attempt_id, RankErrorRow.seq)
    )
    return [(row.attempt_id, ErrorValue.model_validate_json(row.body)) for row in session.scalars(query)]
