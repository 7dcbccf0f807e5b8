"""What all streams of server-sent events share: pages until the end, bounded clients, and what wakes them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from functools import partial

import anyio
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from sse_starlette import EventSourceResponse, ServerSentEvent

from orchestrator.api.hub import StreamPage
from orchestrator.api.service import Service
from orchestrator.errors import NotFound
from orchestrator.store.jobs import last_events

__all__ = ["EVENTS", "LOGS", "follow", "look_at_topics", "sse"]

_log = logging.getLogger(__name__)
EVENTS, LOGS = "events", "logs"
"""Kinds of topics; a topic is the kind, a colon and the job's id."""
_HEARTBEAT_S = 15
_PATIENCE_S = 10.0
"""A stream looks this often by itself: that a file has not grown for a while is nothing that anybody writes."""
_SEND_S = 30.0
"""A client that takes nothing for so long is cut off; what it missed is in the store."""


def sse(data: str, *, event: str, id: str) -> bytes:
    """Encode one event."""
    return ServerSentEvent(data, event=event, id=id).encode()


def follow(
    service: Service, topic: str, key: Hashable, cursor: str, load: Callable[[str], StreamPage]
) -> EventSourceResponse:
    """Answer with what ``load`` gives after ``cursor``, and again whenever ``topic`` has changed, until its end.

    Args:
        key: names what ``load`` selects: followers with the same topic, key and cursor share what is loaded.

    Raises:
        TooManyStreams: no further stream may open.
    """
    service.hub.check_room()
    return EventSourceResponse(
        _chunks(service, topic, key, cursor, load),
        ping=_HEARTBEAT_S,
        send_timeout=_SEND_S,
        shutdown_event=anyio.Event(),
        shutdown_grace_period=1.0,
    )


async def _chunks(
    service: Service, topic: str, key: Hashable, cursor: str, load: Callable[[str], StreamPage]
) -> AsyncIterator[bytes]:
    with service.hub.subscription(topic) as wake:
        while True:
            wake.clear()
            at = cursor
            try:
                page = await service.pages.get((topic, key, at), partial(run_in_threadpool, load, at))
            except (NotFound, SQLAlchemyError) as error:  # pruned meanwhile, or the database is away: it can come back
                _log.warning("a stream of %s ended: %s", topic, error)
                yield sse(json.dumps({"reason": "store_unavailable"}), event="end", id=cursor)
                return
            cursor = page.cursor
            for chunk in page.chunks:
                yield chunk
            if page.end is not None:
                yield sse(page.end, event="end", id=cursor)
                return
            if service.hub.stopping:
                yield sse(json.dumps({"reason": "server_stopping"}), event="end", id=cursor)
                return
            if not page.more:
                with anyio.move_on_after(_PATIENCE_S):
                    await wake.wait()


def look_at_topics(service: Service, topics: Sequence[str]) -> Mapping[str, Hashable]:
    """Return a version of each topic: the job's last event, and for logs the bytes on disk."""
    jobs = {topic: topic.partition(":")[2] for topic in topics}
    with service.database.read() as session:
        events = last_events(session, sorted(set(jobs.values())))
    return {
        topic: (events.get(job_id), service.logs.version(job_id) if topic.startswith(LOGS) else None)
        for topic, job_id in jobs.items()
    }
