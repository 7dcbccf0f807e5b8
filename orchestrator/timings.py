"""Durations that this process measures itself: requests and passes of the reconciler."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

__all__ = ["LATENCY_BOUNDS_S", "Histogram", "TimingMiddleware"]

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """Counts by label values and bucket; safe to use from several threads. Seconds."""

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, labels: tuple[str, ...] = ()) -> None:
        """Count one duration."""
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * (len(self.bounds) + 1))
            counts[bisect.bisect_left(self.bounds, seconds)] += 1
            self._sums[labels] = self._sums.get(labels, 0.0) + seconds

    def snapshot(self) -> dict[tuple[str, ...], tuple[list[int], float]]:
        """Return counts by bucket (one more for the rest) and the sum, by label values."""
        with self._lock:
            return {labels: (list(counts), self._sums[labels]) for labels, counts in self._counts.items()}


_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class TimingMiddleware:
    """Times requests until the answer begins, by URL template: a stream is not slow because it is long."""

    def __init__(self, app: _App, histogram: Histogram) -> None:
        self._app, self._histogram = app, histogram

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def timed_send(message: _Message) -> None:
            if message["type"] == "http.response.start":
                template = getattr(scope.get("route"), "path", "unmatched")
                labels = (template, scope["method"], str(message["status"]))
                self._histogram.observe(time.perf_counter() - began, labels)
            await send(message)

        await self._app(scope, receive, timed_send)
