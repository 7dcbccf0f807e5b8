"""Idempotency keys: the same request again gets the same answer again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sqlalchemy import delete
from sqlalchemy.orm import Session

from orchestrator.errors import IdempotencyMismatch, IdempotencyRunning
from orchestrator.store.models import IdempotencyKey

__all__ = ["KEEP_S", "RUNNING_S", "Answer", "KeyedRequest", "begin", "finish", "forget", "forget_old"]

KEEP_S = 48 * 3600.0
_MAX_ROUTE = 255
RUNNING_S = 600.0
"""After this a request without an answer is taken for one whose server died."""


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request that changes something; one without a key is done again when it is sent again."""

    caller: str
    route: str
    key: str | None
    fingerprint: str

    @classmethod
    def of(cls, caller: str, route: str, key: str | None, query: str, body: bytes) -> KeyedRequest:
        """Return the request with the fingerprint of all that its answer depends on."""
        text = hashlib.sha256(f"{route}\0{query}\0".encode("utf-8", "replace") + body).hexdigest()
        if len(route) > _MAX_ROUTE:  # longer than its column: what does not fit is told apart by its hash
            route = route[: _MAX_ROUTE - 64] + hashlib.sha256(route.encode("utf-8", "replace")).hexdigest()
        return cls(caller, route, key, text)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered."""

    status: int
    body: str


def begin(session: Session, request: KeyedRequest, *, now: float) -> Answer | None:
    """Claim the key; return the earlier answer if there is one.

    Raises:
        IdempotencyMismatch: the key belongs to a request with another body.
        IdempotencyRunning: the first request is not done.
    """
    if request.key is None:
        return None
    identity = (request.caller, request.route, request.key)
    row = session.get(IdempotencyKey, identity, with_for_update=True)
    if row is not None and row.status is None and now - row.created_at > RUNNING_S:
        session.delete(row)
        session.flush()
        row = None
    if row is None:
        caller, route, key = identity
        session.add(
            IdempotencyKey(
                caller=caller, route=route, key=key, fingerprint=request.fingerprint, created_at=now, body=""
            )
        )
        session.flush()
        return None
    if row.fingerprint != request.fingerprint:
        raise IdempotencyMismatch(f"Idempotency-Key {request.key!r} was used with another request; take a new key")
    if row.status is None:
        raise IdempotencyRunning(f"the first request with Idempotency-Key {request.key!r} is not done; ask again later")
    return Answer(row.status, row.body)


def finish(session: Session, request: KeyedRequest, answer: Answer) -> None:
    """Store the answer, for the next request with the key, if there is one."""
    if request.key is None:
        return
    row = session.get_one(IdempotencyKey, (request.caller, request.route, request.key))
    row.status, row.body = answer.status, answer.body


def forget(session: Session, request: KeyedRequest) -> None:
    """Free a key whose request failed, so that it can be tried again."""
    if request.key is None:
        return
    row = session.get(IdempotencyKey, (request.caller, request.route, request.key))
    if row is not None:
        session.delete(row)


def forget_old(session: Session, *, now: float) -> None:
    """Free the keys that are older than :data:`KEEP_S`."""
    session.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < now - KEEP_S))
