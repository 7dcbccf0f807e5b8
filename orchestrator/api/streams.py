"""Events and logs of a job, as a page or as a stream of server-sent events."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from sqlalchemy.orm import Session

from orchestrator import resources as r
from orchestrator.api.auth import Principal, require
from orchestrator.api.build import event_resource, log_page
from orchestrator.api.following import EVENTS, LOGS, follow, sse
from orchestrator.api.hub import StreamPage
from orchestrator.api.service import MAX_INTEGER, Service, ServiceOf, reply
from orchestrator.errors import InvalidInput, NotFound
from orchestrator.logs import Cursor, Part, Selection
from orchestrator.store.attempts import attempts_of
from orchestrator.store.jobs import events_after, find_job
from orchestrator.store.models import Job
from worker.contract.errors import FieldError
from worker.contract.logs import LogStream
from worker.contract.states import JobState

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["jobs"])
Reader = Annotated[Principal, Depends(require("jobs:read"))]
Accept = Annotated[str, Header(description="With text/event-stream the answer is a stream")]
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", description="Where a stream is to go on")]
_CHUNK = 500
_LOG_BYTES = 1 << 18
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@router.get("/jobs/{job_id}/events", response_model=r.EventPage, responses=_STREAM)
async def events(
    service: ServiceOf,
    _: Reader,
    job_id: str,
    accept: Accept = "",
    last_event_id: LastEventId = None,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    """Events after ``after`` (or ``Last-Event-ID``); with ``Accept: text/event-stream`` as they come, until the end."""
    start = after if last_event_id is None else _seq(last_event_id)
    if "text/event-stream" not in accept:
        page, _end = await run_in_threadpool(_load_events, service, job_id, start, limit)
        return reply(r.EventPage(events=page, next_after=page[-1].seq if page else start))
    await run_in_threadpool(_load_events, service, job_id, start, 1)  # an unknown job is an error, not a stream
    return follow(
        service, f"{EVENTS}:{job_id}", None, str(start), lambda cursor: _event_chunks(service, job_id, int(cursor))
    )


def _seq(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_INTEGER:
        return int(text)
    shown = text if len(text) <= 40 else text[:40] + "..."
    error = FieldError(
        pointer="/header/Last-Event-ID", code="unreadable", message=f"found {shown!r}, expected the id of an event"
    )
    raise InvalidInput("Last-Event-ID cannot be read", (error,))


def _load_events(
    service: Service, job_id: str, after: int, limit: int
) -> tuple[tuple[r.EventResource, ...], str | None]:
    """Return events, and the state once it is terminal and no more will come."""
    with service.database.read() as session:
        job = find_job(session, job_id)
        rows = events_after(session, job_id, after, limit)
        ended = JobState(job.state).terminal and len(rows) < limit
        return tuple(map(event_resource, rows)), _end(job) if ended else None


def _end(job: Job) -> str:
    return json.dumps({"state": job.state, "reason": job.reason, "message": job.message})


def _event_chunks(service: Service, job_id: str, after: int) -> StreamPage:
    found, end = _load_events(service, job_id, after, _CHUNK)
    chunks = tuple(sse(event.model_dump_json(), event=event.kind, id=str(event.seq)) for event in found)
    return StreamPage(chunks, str(found[-1].seq if found else after), more=len(found) == _CHUNK, end=end)


@router.get("/jobs/{job_id}/logs", response_model=r.LogPage, responses=_STREAM)
async def logs(
    service: ServiceOf,
    _: Reader,
    job_id: str,
    accept: Accept = "",
    last_event_id: LastEventId = None,
    after: Annotated[str | None, Query(max_length=65_536, description="``next_after`` of the page before")] = None,
    attempt: Annotated[int | None, Query(ge=1, lt=10**9, description="Default: the last; a stream: the first")] = None,
    rank: Annotated[int | None, Query(ge=0, lt=10**9, description="Default: all ranks")] = None,
    stream: Annotated[LogStream | None, Query(description="Default: both")] = None,
    limit_bytes: Annotated[int, Query(ge=1, le=1 << 20)] = _LOG_BYTES,
) -> Response:
    """What the ranks wrote, in lines; with ``Accept: text/event-stream`` as it comes, over all attempts, to the end."""
    wanted, place = Selection(rank, stream), last_event_id if last_event_id is not None else after
    where = "/header/Last-Event-ID" if last_event_id is not None else "/query/after"
    cursor = None if place is None else Cursor.parse(place, where)
    following = "text/event-stream" in accept
    start = await run_in_threadpool(_log_start, service, job_id, cursor, attempt, following)
    if not following:
        part, _more, _ended = await run_in_threadpool(_load_logs, service, job_id, start, wanted, limit_bytes)
        return reply(log_page(part))
    return follow(
        service, f"{LOGS}:{job_id}", (wanted,), str(start),
        lambda text: _log_chunks(service, job_id, Cursor.parse(text, where), wanted),
    )  # fmt: skip


def _log_start(service: Service, job_id: str, cursor: Cursor | None, attempt: int | None, following: bool) -> Cursor:
    """Return where to begin.

    Raises:
        NotFound: there is no such job or attempt.
    """
    with service.database.read() as session:
        find_job(session, job_id)
        numbers = [row.number for row in attempts_of(session, job_id)]
    if cursor is not None:
        attempt = cursor.attempt
    if attempt is not None and attempt not in numbers and (numbers or cursor is None or attempt != 1):
        raise NotFound(f"job {job_id} has no attempt {attempt}; it has {numbers or 'none yet'}")
    if cursor is not None:
        return cursor
    return Cursor(attempt or (1 if following or not numbers else numbers[-1]))


def _load_logs(
    service: Service, job_id: str, cursor: Cursor, wanted: Selection, limit_bytes: int
) -> tuple[Part, bool, str | None]:
    """Return lines, whether a later attempt follows, and the job's end once it is terminal."""
    with service.database.read() as session:
        job = find_job(session, job_id)
        over, last = _attempt_over(session, job, cursor.attempt)
    part = service.logs.read(job_id, cursor, wanted, limit_bytes=limit_bytes, ended=over)
    return part, last > cursor.attempt, _end(job) if JobState(job.state).terminal else None


def _attempt_over(session: Session, job: Job, number: int) -> tuple[bool, int]:
    """Return whether an attempt has ended, and the number of the last one."""
    rows = {row.number: row for row in attempts_of(session, job.id)}
    row = rows.get(number)
    over = JobState(job.state).terminal if row is None else row.ended_at is not None
    return over, max(rows, default=number)


def _log_chunks(service: Service, job_id: str, cursor: Cursor, wanted: Selection) -> StreamPage:
    part, later, end = _load_logs(service, job_id, cursor, wanted, _LOG_BYTES)
    after, more = part.cursor, bool(part.lines)
    if part.drained and not more and later:
        after, more = Cursor(cursor.attempt + 1), True
    chunks = (sse(log_page(part).model_dump_json(), event="lines", id=str(after)),) if part.lines else ()
    finished = part.drained and not more and end is not None
    return StreamPage(chunks, str(after), more=more, end=end if finished else None)
