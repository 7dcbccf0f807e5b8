"""Running the application under uvicorn, with an end that does not wait for open streams."""

from __future__ import annotations

import asyncio
import gc
import sys
from types import FrameType
from typing import ClassVar

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.api.app import service_of

__all__ = ["serve"]

_GRACE_S = 2
_COLLECTIONS = (2000, 10, 50)
"""A full collection, which a thousand streams make long, after a million new objects; the young are looked at often."""


class _Protocol(H11Protocol):
    """Hangs up on a client that does not finish the head of a request in time; its body has a limit of its own."""

    head_timeout_s: ClassVar[float] = 20.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_has_come()
        elif self._late is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(self.head_timeout_s, self._hang_up)

    def _head_has_come(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _hang_up(self) -> None:
        self._late = None
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """Tells streams to end as soon as a signal comes, and ends with code 0 after it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The base class would raise the signal again at the end: a wanted end is no failure.
        app = self.config.app
        if isinstance(app, FastAPI):
            service_of(app).hub.stop()
        self.should_exit = True


def _protocol(head_timeout_s: float) -> type[H11Protocol]:
    return type("Protocol", (_Protocol,), {"head_timeout_s": head_timeout_s})


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Streams are told to end, other requests have two seconds."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        timeout_graceful_shutdown=_GRACE_S,
        log_level="info",
        access_log=False,
        http=_protocol(service_of(app).settings.request_timeout_s),
        server_header=False,
    )
    sys.setswitchinterval(0.001)  # a request waits this long for the reconciler's thread, not five times that
    gc.collect()
    gc.freeze()  # modules and models stay for good: to look through them for garbage would hold up a request by 0.1 s
    gc.set_threshold(*_COLLECTIONS)
    _Server(config).run()
