"""Waking streams: when something was written, and when the server is about to end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Hub"]


class Hub:
    """Streams wait here. :meth:`notify` and :meth:`stop` may be called from any thread or signal handler."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may interrupt the thread that holds it
        self._waiters: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.stopping = False

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return len(self._waiters)

    @contextlib.contextmanager
    def subscription(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever a stream should look again; the stream clears it."""
        event = asyncio.Event()
        with self._lock:
            self._waiters[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            with self._lock:
                del self._waiters[event]

    def notify(self) -> None:
        """Something was written."""
        with self._lock:
            for event, loop in self._waiters.items():
                with contextlib.suppress(RuntimeError):  # the loop is closed: its streams are gone
                    loop.call_soon_threadsafe(event.set)

    def stop(self) -> None:
        """The server is about to end: streams say so and close."""
        self.stopping = True
        self.notify()
