"""Waking streams: when something of theirs was written, and when the server is about to end.

A stream subscribes to a topic. One task looks at all topics at once, when something was written and once a second
besides, and wakes only the streams whose topic has changed: what a write costs does not grow with the followers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.errors import TooManyStreams

__all__ = ["Hub", "Pages", "StreamPage"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
Look = Callable[[Sequence[str]], Awaitable[Mapping[str, Hashable]]]
"""Returns a version of each topic, which is another one whenever there is something new."""
_LOOK_AGAIN_S = 1.0
"""Topics are looked at this often even if nobody said that something was written: another process may have."""
_GATHER_S = 0.5
"""Pause after a look: what is written meanwhile is told together."""
_SLICE = 25
"""Streams that are woken at once; between two slices other requests have their turn."""


@dataclass(frozen=True, slots=True)
class StreamPage:
    """What one load gives to a stream."""

    chunks: tuple[bytes, ...]
    """Events, encoded once for all who follow."""
    cursor: str
    more: bool = False
    """There is more to load at once."""
    end: str | None = None
    """Data of the last event, once nothing more will come."""


class Hub:
    """Streams wait here. :meth:`notify` and :meth:`stop` may be called from any thread or signal handler."""

    def __init__(self, max_streams: int = 2000) -> None:
        self._max_streams = max_streams
        self._topics: dict[str, set[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._written: asyncio.Event | None = None
        self.open_streams = 0
        self.stopping = False

    @contextlib.contextmanager
    def subscription(self, topic: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever a stream should look again; the stream clears it."""
        event = asyncio.Event()
        self._topics.setdefault(topic, set()).add(event)
        self.open_streams += 1
        try:
            yield event
        finally:
            self.open_streams -= 1
            waiting = self._topics[topic]
            waiting.discard(event)
            if not waiting:
                del self._topics[topic]

    def check_room(self) -> None:
        """Raise :class:`TooManyStreams` when no further stream may open."""
        if self.open_streams >= self._max_streams:
            raise TooManyStreams(f"{self.open_streams} streams are open, as many as are allowed; ask for pages instead")

    def notify(self) -> None:
        """Something was written."""
        loop, written = self._loop, self._written
        if loop is not None and written is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: its streams are gone
                loop.call_soon_threadsafe(written.set)

    def stop(self) -> None:
        """The server is about to end: streams say so and close."""
        self.stopping = True
        self.notify()

    async def watch(self, look: Look) -> None:
        """Wake streams until cancelled; the application runs this as a task."""
        self._loop, self._written = asyncio.get_running_loop(), asyncio.Event()
        seen: Mapping[str, Hashable] = {}
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._written.wait(), _LOOK_AGAIN_S)
            self._written.clear()
            if self.stopping:
                await self._wake(list(self._topics))
                continue
            if not self._topics:
                seen = {}
                continue
            try:
                found = await look(list(self._topics))
            except Exception:  # the streams find the same when they look, and say so
                _log.exception("what streams wait for cannot be looked at; the next look tries again")
                found = {}
                await self._wake(list(self._topics))
            await self._wake([topic for topic, version in found.items() if seen.get(topic) != version])
            seen = found
            await asyncio.sleep(_GATHER_S)

    async def _wake(self, topics: Sequence[str]) -> None:
        events = [event for topic in topics for event in self._topics.get(topic, ())]
        for number, event in enumerate(events, 1):
            event.set()
            if number % _SLICE == 0 and not self.stopping:
                await asyncio.sleep(0.005)


class Pages(Generic[T]):
    """Loading that followers share: who asks for the same while it is loaded waits for that."""

    def __init__(self) -> None:
        self._loading: dict[Hashable, asyncio.Future[T]] = {}

    async def get(self, key: Hashable, load: Callable[[], Awaitable[T]]) -> T:
        """Return what ``load`` returns, which is called once for all who ask for ``key`` at the same time."""
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.ensure_future(load())
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(loading)  # one that leaves does not end the loading for the others
