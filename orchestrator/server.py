"""Running the application under uvicorn, with an end that does not wait for open streams."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import sys
from types import FrameType
from typing import ClassVar

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.api.app import service_of

__all__ = ["allow_open_files", "serve"]

_log = logging.getLogger(__name__)
_GRACE_S = 2
_OTHER_FILES = 2048
"""Connections that are no streams, the database's, logs that are read."""
_COLLECTIONS = (2000, 10, 50)
"""A full collection, which a thousand streams make long, after a million new objects; the young are looked at often."""


class _Protocol(H11Protocol):
    """Hangs up on a client that does not finish the head of a request in time, or takes nothing of an answer so long.

    The body of a request has a limit of its own.
    """

    timeout_s: ClassVar[float] = 20.0
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that pause_writing tells of each byte that is not taken
        self._wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        self._all_is_sent()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_has_come()
        elif self._late is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        self._all_is_sent()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(self.timeout_s, self._hang_up)

    def _head_has_come(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _hang_up(self) -> None:
        self._late = None
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def _watch_unsent(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self.timeout_s, self._drop_if_stuck, unsent)

    def _drop_if_stuck(self, unsent_before: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_before:
            self._watch_unsent()
        else:
            self.transport.abort()  # to close it would wait for the client to take the rest

    def _all_is_sent(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


class _Server(uvicorn.Server):
    """Tells streams to end as soon as a signal comes, and ends with code 0 after it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The base class would raise the signal again at the end: a wanted end is no failure.
        app = self.config.app
        if isinstance(app, FastAPI):
            service_of(app).hub.stop()
        self.should_exit = True


def _protocol(timeout_s: float) -> type[H11Protocol]:
    return type("Protocol", (_Protocol,), {"timeout_s": timeout_s})


def allow_open_files(number: int) -> None:
    """See that this process may hold ``number`` files and sockets: systems often begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        given = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (given, hard))
        if given < number:
            _log.warning("only %d files may be open, %d are wanted: raise the limit (ulimit -Hn)", given, number)


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Streams are told to end, other requests have two seconds."""
    settings = service_of(app).settings
    allow_open_files(settings.max_streams + _OTHER_FILES)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        timeout_graceful_shutdown=_GRACE_S,
        log_level="info",
        access_log=False,
        http=_protocol(settings.request_timeout_s),
        server_header=False,
    )
    sys.setswitchinterval(0.001)  # a request waits this long for the reconciler's thread, not five times that
    gc.collect()
    gc.freeze()  # modules and models stay for good: to look through them for garbage would hold up a request by 0.1 s
    gc.set_threshold(*_COLLECTIONS)
    _Server(config).run()
