"""Time of one piece of work, measured where it runs and never by synchronising a device.

On a CPU a span reads a monotonic clock; the end of a collective comes from its completion callback. On CUDA it records
events and answers only when they are done.

Note "Threads that come back". Callbacks run in threads of the process group. CPython makes a state for a foreign thread
when it comes in and frees it when it goes; each time the first frame maps and unmaps a page of stack, and unmapping
interrupts the other cores. Over a step of 46 collectives that was 1.1 % of its CPU time, three times what all of
telemetry's own code takes. So a thread's state is kept from its first callback on: one for each thread of the groups.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Protocol, cast

import torch

__all__ = ["DeviceSpan", "Event", "HostSpan", "Span", "Work", "start_span"]


class Future(Protocol):
    """The part of ``torch.futures.Future`` that is used."""

    def add_done_callback(self, callback: object) -> None:
        """Run ``callback`` when the work has ended."""


class Work(Protocol):
    """The part of ``torch.distributed.Work`` that is used."""

    def wait(self) -> bool:
        """Block the host (CPU) or the current stream (CUDA) until the work has ended."""

    def is_completed(self) -> bool:
        """Tell whether it has ended, without waiting."""

    def get_future(self) -> Future:
        """Return a future of the work."""


class Event(Protocol):
    """The part of ``torch.Event`` that is used."""

    def record(self) -> None:
        """Mark this point of the current stream."""

    def query(self) -> bool:
        """Tell whether the device has passed the point."""

    def elapsed_time(self, end_event: object) -> float:
        """Return milliseconds from this event to ``end_event``."""

    def synchronize(self) -> None:
        """Block the host until the device has passed the point."""


class Span(Protocol):
    """A started piece of work."""

    def follow(self, work: Work) -> None:
        """Take the end from an asynchronous collective."""

    def wait(self, work: Work) -> None:
        """Wait for ``work`` and count the wait as exposed."""

    def pass_by(self, work: Work) -> None:
        """Wait for ``work`` where no compute stands still for it."""

    def hold_up(self) -> None:
        """Count what is left of work that was passed by as exposed: compute now waits for something behind it."""

    def finish(self) -> None:
        """End the span here (synchronous work)."""

    def seconds(self) -> float | None:
        """Return start to end, or None while it is not known."""

    def exposed_seconds(self) -> float:
        """Return the time for which compute waited; call it only when :meth:`seconds` is known."""

    def settle(self) -> bool:
        """Block the host until compute has its result, and tell whether :meth:`seconds` is known. Where compute does
        not wait for the result yet it is not, and nothing blocks."""

    def release(self) -> None:
        """Give back what measuring took: the span was counted, and nobody asks it again."""


class _Local(threading.local):
    is_kept = False


_LOCAL = _Local()


def _keep_thread_state() -> None:
    """Take one more hold of the calling thread's state than is ever released; see the note of this module."""
    _LOCAL.is_kept = True
    ctypes.pythonapi.PyGILState_Ensure()


class HostSpan:
    """A span on the host clock. ``previous`` is the work before it on the same communicator, which runs one at a time:
    a collective that was issued early starts when that one ends, and the time in the queue is nobody's."""

    __slots__ = ("_end_s", "_exposed_s", "_previous", "_start_s", "_waiting")

    def __init__(self, previous: HostSpan | None = None) -> None:
        self._start_s = time.perf_counter()
        self._previous = previous
        self._end_s: float | None = None
        self._exposed_s = 0.0
        self._waiting = False

    def _ended(self, _future: object) -> None:
        self._end_s = time.perf_counter()
        if not _LOCAL.is_kept:
            _keep_thread_state()

    def follow(self, work: Work) -> None:
        """Let the completion callback set the end."""
        self._waiting = True
        work.get_future().add_done_callback(self._ended)

    def wait(self, work: Work) -> None:
        """Block until ``work`` has ended; the time blocked is exposed."""
        begin = time.perf_counter()
        work.wait()
        end = time.perf_counter()
        self._exposed_s += end - begin
        self._waiting = False
        if self._end_s is None:  # the callback thread may be a moment late
            self._end_s = end

    def pass_by(self, work: Work) -> None:
        """Block until ``work`` has ended; the host has nothing but compute, so this is exposed as well."""
        self.wait(work)

    def hold_up(self) -> None:
        """Count nothing more: :meth:`pass_by` has counted all of it."""

    def finish(self) -> None:
        """End now."""
        self._end_s = time.perf_counter()

    def seconds(self) -> float | None:
        """Return start to end, or None while the work runs or nobody has waited for it."""
        if self._end_s is None or self._waiting:
            return None
        if self._previous is not None:
            if self._previous._end_s is not None:
                self._start_s = min(max(self._start_s, self._previous._end_s), self._end_s)
            self._previous = None
        return self._end_s - self._start_s

    def exposed_seconds(self) -> float:
        """Return the time blocked in :meth:`wait`, never more than the span itself."""
        return min(self._exposed_s, self.seconds() or 0.0)

    def settle(self) -> bool:
        """Tell whether it has ended: the host has waited for it, or nobody has yet."""
        return self.seconds() is not None

    def release(self) -> None:
        """Give nothing back: only a clock was read."""


class DeviceSpan:
    """A span on CUDA events. ``previous`` is the end of the work before it on the same communicator, and ``probe`` a
    stream for the ends of that communicator alone: another's, taken on it before, would hold this end up. ``spare`` has
    events of the same device that were counted: to make one and to let go of it takes the host as long as to record it.
    """

    __slots__ = ("_blocked", "_is_aside", "_previous", "_probe", "_seconds", "_spare", "_start", "_waiting", "end")

    def __init__(
        self,
        probe: torch.cuda.Stream | None = None,
        previous: Event | None = None,
        spare: list[Event] | None = None,
    ) -> None:
        self._probe = probe
        self._previous = previous
        self._spare = [] if spare is None else spare
        self._start: Event | None = self._record()
        self.end: Event | None = None
        self._blocked: Event | None = None
        """Where compute began to wait. It goes on at the end: no event behind the wait would say more."""
        self._waiting = self._is_aside = False
        self._seconds: float | None = None

    def _record(self) -> Event:
        """Mark this point of the current stream, by torch's own type: ``torch.cuda.Event`` takes the host 10 us."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = cast(Event, torch.Event(enable_timing=True))
        event.record()
        return event

    def follow(self, work: Work) -> None:
        """Record the end on a side stream that waits for the communicator's stream."""
        assert self._probe is not None, "one for each communicator"
        self._waiting = True
        with self._probe:  # in C++, unlike torch.cuda.stream
            work.wait()
            self.end = self._record()

    def wait(self, work: Work) -> None:
        """Make the current stream wait from here on."""
        self._blocked = self._record()
        work.wait()
        self._waiting = False

    def pass_by(self, work: Work) -> None:
        """Make the current stream, one beside compute, wait."""
        work.wait()
        self._waiting, self._is_aside = False, True

    def hold_up(self) -> None:
        """Take this point of the current stream as where compute began to wait for something behind this work."""
        if self._start is None:
            return  # counted: it had ended before compute came
        self._blocked = self._record()

    def finish(self) -> None:
        """End at this point of the current stream."""
        self.end = self._record()

    def seconds(self) -> float | None:
        """Return seconds on the device; a start inside the work before it counts from that work's end."""
        if self._seconds is not None or self._start is None:
            return self._seconds
        if self.end is not None and not self._waiting and all(mark.query() for mark in self._marks()):
            elapsed_ms = self._start.elapsed_time(self.end)
            if self._previous is not None:  # taken on the same probe, so it is over too
                elapsed_ms = min(elapsed_ms, self._previous.elapsed_time(self.end))
            self._seconds = float(max(elapsed_ms, 0.0)) / 1e3
        return self._seconds

    def _marks(self) -> list[Event]:
        """Return the points that the device passes before all is known: the end, and where compute began to wait."""
        return [mark for mark in (self.end, self._blocked) if mark is not None]

    def exposed_seconds(self) -> float:
        """Return the time for which the waiting stream stood still, never more than the span itself: a wait that began
        while the work before was still running is that work's up to its end."""
        if self._blocked is None:
            return 0.0
        left_ms = self._blocked.elapsed_time(self.end)
        return min(max(float(left_ms), 0.0) / 1e3, self.seconds() or 0.0)

    def settle(self) -> bool:
        """Wait for the device to come to the end, and to where compute began to wait for it."""
        if self._waiting or self.end is None or (self._is_aside and self._blocked is None):
            return False
        for mark in self._marks():
            mark.synchronize()
        return self.seconds() is not None

    def release(self) -> None:
        """Let other spans have the events, but for the end, from which the next work on the communicator counts."""
        self._spare += [event for event in (self._start, self._blocked) if event is not None]
        self._start, self._blocked, self._previous = None, None, None


def start_span(device: torch.device) -> Span:
    """Start a span of synchronous work on ``device``."""
    return DeviceSpan() if device.type == "cuda" else HostSpan()
