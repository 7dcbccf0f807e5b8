"""Leases: what only one control plane may do at a time."""

from __future__ import annotations

from sqlalchemy.orm import Session

from orchestrator.store.models import Lease

__all__ = ["acquire", "release"]


def acquire(session: Session, name: str, holder: str, *, now: float, duration_s: float) -> bool:
    """Take or renew a lease; False when another holder's has not run out."""
    row = session.get(Lease, name, with_for_update=True)
    if row is None:
        session.add(Lease(name=name, holder=holder, expires_at=now + duration_s))
        return True
    if row.holder != holder and row.expires_at >= now:
        return False
    row.holder, row.expires_at = holder, now + duration_s
    return True


def release(session: Session, name: str, holder: str) -> None:
    """Give a lease back, if ``holder`` has it."""
    row = session.get(Lease, name, with_for_update=True)
    if row is not None and row.holder == holder:
        session.delete(row)
