"""Where this process is: its phase, and the collective it waits for. Written in passing, read by whoever watches.

Every rank issues the same collectives in the same order, so of two ranks the one with fewer marks is behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["PROGRESS", "Position", "Progress"]


@dataclass(frozen=True, slots=True)
class Position:
    """One look at a process.

    Attributes:
        phase: What it does, in the caller's words; empty before the first.
        seconds: Since it began that.
        marks: Phases begun and collectives issued so far.
        waiting: The collective that it waits for; empty when it computes.
        waiting_seconds: Since it began to wait; 0 when it computes.
    """

    phase: str
    seconds: float
    marks: int
    waiting: str
    waiting_seconds: float


class Progress:
    """A position that one thread writes, without locks, and others read."""

    def __init__(self) -> None:
        self._phase = ("", time.monotonic())
        self._waiting: tuple[str, float] | None = None
        self._marks = 0

    def enter(self, phase: str) -> None:
        """Begin ``phase``; beginning it again starts its clock anew."""
        self._marks += 1
        self._phase = (phase, time.monotonic())

    def issued(self) -> int:
        """Count a collective; return its number."""
        self._marks += 1
        return self._marks

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say that the body waits for ``what``."""
        before, self._waiting = self._waiting, (what, time.monotonic())
        try:
            yield
        finally:
            self._waiting = before

    def look(self) -> Position:
        """Return where the process is now."""
        now, (phase, since), waiting = time.monotonic(), self._phase, self._waiting
        what, waits_since = ("", now) if waiting is None else waiting
        return Position(phase, now - since, self._marks, what, now - waits_since)


PROGRESS = Progress()
"""The position of this process, which the runtime and its caller write."""
