"""Events of a job, as a page or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from orchestrator import resources as r
from orchestrator.api.auth import Principal, require
from orchestrator.api.build import event_resource
from orchestrator.api.service import MAX_INTEGER, Service, ServiceOf, reply
from orchestrator.errors import InvalidInput
from orchestrator.store.jobs import events_after, find_job
from worker.contract.errors import FieldError
from worker.contract.states import JobState

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["jobs"])
Reader = Annotated[Principal, Depends(require("jobs:read"))]
_LOOK_AGAIN_S = 1.0
"""A stream looks this often even if nothing woke it: another process may have written."""
_CHUNK = 500
_HEARTBEAT_S = 15
_SEND_S = 30.0
"""A client that takes nothing for so long is cut off; what it missed is in the store."""


@router.get(
    "/jobs/{job_id}/events",
    response_model=r.EventPage,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    service: ServiceOf,
    _: Reader,
    job_id: str,
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    """Events after ``after`` (or ``Last-Event-ID``); with ``Accept: text/event-stream`` as they come, until the end."""
    start = after if last_event_id is None else _seq(last_event_id)
    if "text/event-stream" not in accept:
        page, _end = await run_in_threadpool(_load, service, job_id, start, limit)
        return reply(r.EventPage(events=page, next_after=page[-1].seq if page else start))
    await run_in_threadpool(_load, service, job_id, start, 1)  # an unknown job is an error, not a stream
    return EventSourceResponse(
        _stream(service, job_id, start),
        ping=_HEARTBEAT_S,
        send_timeout=_SEND_S,
        shutdown_event=anyio.Event(),
        shutdown_grace_period=1.0,
    )


def _seq(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_INTEGER:
        return int(text)
    shown = text if len(text) <= 40 else text[:40] + "..."
    error = FieldError(
        pointer="/header/Last-Event-ID", code="unreadable", message=f"found {shown!r}, expected the id of an event"
    )
    raise InvalidInput("Last-Event-ID cannot be read", (error,))


def _load(service: Service, job_id: str, after: int, limit: int) -> tuple[tuple[r.EventResource, ...], str | None]:
    """Return events, and the state once it is terminal and no more will come."""
    with service.database.read() as session:
        job = find_job(session, job_id)
        rows = events_after(session, job_id, after, limit)
        ended = JobState(job.state).terminal and len(rows) < limit
        end = json.dumps({"state": job.state, "reason": job.reason, "message": job.message}) if ended else None
        return tuple(map(event_resource, rows)), end


async def _stream(service: Service, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    with service.hub.subscription() as wake:
        while True:
            wake.clear()
            found, end = await run_in_threadpool(_load, service, job_id, after, _CHUNK)
            for event in found:
                after = event.seq
                yield ServerSentEvent(event.model_dump_json(), event=event.kind, id=str(after))
            if end is not None:
                yield ServerSentEvent(end, event="end", id=str(after))
                return
            if service.hub.stopping:
                yield ServerSentEvent(json.dumps({"reason": "server_stopping"}), event="end", id=str(after))
                return
            if len(found) < _CHUNK:
                await _wait(wake)


async def _wait(wake: asyncio.Event) -> None:
    with anyio.move_on_after(_LOOK_AGAIN_S):
        await wake.wait()
