"""What the routes share, and how they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request
from fastapi.responses import Response
from pydantic import BaseModel
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect

from orchestrator.api.auth import Authenticator, Principal
from orchestrator.api.hub import Hub, Pages, StreamPage
from orchestrator.api.refusal_budget import RefusalBudget
from orchestrator.clock import Clock
from orchestrator.errors import BadRequest, PreconditionFailed, ServiceError
from orchestrator.logs import LogStore
from orchestrator.planner import Planner
from orchestrator.reconcile.loop import Reconciler
from orchestrator.settings import Settings
from orchestrator.store.audit import add_audit
from orchestrator.store.database import Database
from orchestrator.store.idempotency import Answer, KeyedRequest, begin, finish
from orchestrator.timings import Histogram

__all__ = [
    "JSON", "MAX_INTEGER", "Body", "IdempotencyHeader", "MatchHeader", "Service", "ServiceOf", "answer_once",
    "check_match", "keyed", "note", "noted", "replay", "reply",
]  # fmt: skip

JSON = "application/json"
MAX_INTEGER = 2**63 - 1
"""What a column of the store holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The parts of a running control plane."""

    settings: Settings
    database: Database
    planner: Planner
    reconciler: Reconciler
    authenticator: Authenticator
    hub: Hub
    pages: Pages[StreamPage]
    logs: LogStore
    clock: Clock
    refusals: RefusalBudget
    http_seconds: Histogram
    pass_seconds: Histogram

    def changed(self) -> None:
        """Something was written: streams and reconciler look at once."""
        self.hub.notify()
        self.reconciler.wake()


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:  # nobody hears it; but it is nothing that failed here
        raise BadRequest("the client left before the body had come whole") from None


ServiceOf = Annotated[Service, Depends(_service)]
Body = Annotated[bytes, Depends(_body)]
IdempotencyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=255, description="The same key and request: the same answer"
    ),
]
MatchHeader = Annotated[
    str | None,
    Header(alias="If-Match", max_length=4096, description="Do it only to this version: an ETag that was read"),
]


def check_match(what: str, version: int | str, if_match: str | None) -> None:
    """Compare ``If-Match``, if it was sent, with the version that there is.

    Raises:
        PreconditionFailed: it names other versions.
    """
    current = f'"{version}"'
    if if_match is not None and not {"*", current} & {tag.strip() for tag in if_match.split(",")}:
        raise PreconditionFailed(f"{what} is at {current}; If-Match says {if_match}. Read it again.")


def reply(model: BaseModel, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a document; numbers that JSON does not know become strings."""
    return Response(model.model_dump_json(), status_code=status, media_type=JSON, headers=dict(headers or {}))


def replay(answer: Answer) -> Response:
    """Answer as the first time."""
    return Response(answer.body, status_code=answer.status, media_type=JSON, headers={"Idempotent-Replayed": "true"})


def keyed(request: Request, principal: Principal, key: str | None, body: bytes) -> KeyedRequest:
    """Return what identifies a request that changes something."""
    route = f"{request.method} {request.url.path}"
    return KeyedRequest.of(principal.name, route, key, request.url.query, body)


def answer_once(service: Service, request: KeyedRequest, status: int, work: Callable[[Session], BaseModel]) -> Response:
    """Do ``work``, note it in the audit and keep its answer under its key, all in one transaction; or answer again.

    A refusal changes nothing, and is noted too.
    """
    with noted(service, request), service.database.write() as session:
        earlier = begin(session, request, now=service.clock())
        if earlier is not None:
            return replay(earlier)
        model = work(session)
        session.flush()
        finish(session, request, Answer(status, model.model_dump_json()))
        note(service, session, request, str(getattr(model, "id", "")), str(status))
    service.changed()
    return reply(model, status=status)


@contextmanager
def noted(service: Service, request: KeyedRequest, target: str = "") -> Iterator[None]:
    """Write into the audit that the request was refused, if that is what comes of it; the refusal goes on."""
    try:
        yield
    except ServiceError as refused:
        with service.database.write() as session:
            note(service, session, request, target, refused.code)
        raise


def note(service: Service, session: Session, request: KeyedRequest, target: str, outcome: str) -> None:
    """Write a request into the audit."""
    add_audit(
        session, actor=request.caller, action=request.route, target=target, request_hash=request.fingerprint,
        outcome=outcome, now=service.clock(),
    )  # fmt: skip
