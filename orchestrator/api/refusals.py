"""Who was turned away, or sent what no route could read: written into the audit.

So many a second at most, with a count of what was not.
"""

from __future__ import annotations

import hashlib
import logging

from fastapi import Request
from sqlalchemy.exc import SQLAlchemyError

from orchestrator.api.service import Service, note
from orchestrator.errors import ServiceError
from orchestrator.store.idempotency import KeyedRequest

__all__ = ["note_refusal"]

_log = logging.getLogger(__name__)


def note_refusal(service: Service, request: Request, error: ServiceError) -> None:
    """Write who asked for what without being allowed to, or in words that are none.

    A store that is away changes nothing about the refusal.
    """
    passed_over = service.refusals.take()
    if passed_over is None:
        return
    route = f"{request.method} {request.url.path}"
    call = KeyedRequest.of(_actor(request), route, None, request.url.query, b"")
    outcome = error.code if not passed_over else f"{error.code} (and {passed_over} of anyone before it)"
    try:
        with service.database.write() as session:
            note(service, session, call, "", outcome)
    except (SQLAlchemyError, ServiceError) as failure:
        _log.warning(
            "%s of %s by %s could not be written into the audit: %s", outcome, call.route, call.caller, failure
        )
    finally:
        service.refusals.done()


def _actor(request: Request) -> str:
    """Name who asked: by their token if it is known, else by a hash of what they sent and where they came from."""
    known = getattr(request.state, "principal", None)
    if known is not None:
        return str(known)
    _, _, token = request.headers.get("authorization", "").partition(" ")
    name = f"unknown-{hashlib.sha256(token.strip().encode()).hexdigest()[:8]}" if token.strip() else "nobody"
    return f"{name}@{request.client.host if request.client else 'nowhere'}"[:64]
