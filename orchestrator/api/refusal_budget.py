"""How many refusals are written into the audit."""

from __future__ import annotations

import threading

from orchestrator.clock import Clock

__all__ = ["RefusalBudget"]

_A_SECOND = 5
"""Refusals that are written in one second: guessing tokens must not fill the disk nor hold up those who may write."""


class RefusalBudget:
    """Says which refusals are to be written. May be asked from several threads."""

    def __init__(self, clock: Clock, a_second: int = _A_SECOND) -> None:
        self._clock, self._a_second = clock, a_second
        self._lock = threading.Lock()
        self._second, self._written, self._passed_over = -1, 0, 0
        self._writing = False

    def take(self) -> int | None:
        """Return how many were passed over since the last one that was written; None to pass over this one too.

        One is written at a time: while the store is slow they take no more than one of the server's threads. Who was
        given a number calls :meth:`done`.
        """
        with self._lock:
            second = int(self._clock())
            if second != self._second:
                self._second, self._written = second, 0
            if self._writing or self._written >= self._a_second:
                self._passed_over += 1
                return None
            self._written += 1
            self._writing = True
            passed_over, self._passed_over = self._passed_over, 0
            return passed_over

    def done(self) -> None:
        """It is written, or could not be."""
        with self._lock:
            self._writing = False
