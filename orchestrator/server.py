"""Running the application under uvicorn, with an end that does not wait for open streams."""

from __future__ import annotations

import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from orchestrator.api.app import service_of

__all__ = ["serve"]

_GRACE_S = 2


class _Server(uvicorn.Server):
    """Tells streams to end as soon as a signal comes, and ends with code 0 after it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The base class would raise the signal again at the end: a wanted end is no failure.
        app = self.config.app
        if isinstance(app, FastAPI):
            service_of(app).hub.stop()
        self.should_exit = True


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Streams are told to end, other requests have two seconds."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        timeout_graceful_shutdown=_GRACE_S,
        log_level="info",
        access_log=False,
        server_header=False,
    )
    sys.setswitchinterval(0.001)  # a request waits this long for the reconciler's thread, not five times that
    _Server(config).run()
