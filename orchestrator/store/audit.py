"""The record of requests that were to change something: who, what, when, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from orchestrator.store.models import AuditRow

__all__ = ["add_audit", "audit_before"]


def add_audit(
    session: Session, *, actor: str, action: str, target: str, request_hash: str, outcome: str, now: float
) -> None:
    """Append to the record; ``outcome`` is the status of the answer, or the code of the refusal."""
    row = AuditRow(at=now, actor=actor, action=action, target=target, request_hash=request_hash, outcome=outcome)
    session.add(row)


def audit_before(session: Session, number: int | None, limit: int, *, target: str | None = None) -> Sequence[AuditRow]:
    """Return up to ``limit`` entries that came before ``number``, newest first; of one target, or of all."""
    query = select(AuditRow).order_by(AuditRow.number.desc()).limit(limit)
    if number is not None:
        query = query.where(AuditRow.number < number)
    if target is not None:
        query = query.where(AuditRow.target == target)
    return session.scalars(query).all()
