"""The bounded outbox of an attempt: what the ranks told, numbered, until the control plane has read it."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from worker.contract.messages import AttemptEnd, Entry, Milestone, PollBatch, RankError, RankReport

__all__ = ["Outbox"]


class Outbox:
    """Entries in order, numbered from 1 without gaps; the oldest leave when it is full, and are counted.

    Nothing enters after the end of the attempt.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._next_seq = 1
        self._dropped = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """True when the last entry is in."""
        return self._ended

    def append(self, body: RankReport | Milestone | RankError | AttemptEnd) -> None:
        """Number ``body`` and keep it; after the end it is dropped and counted."""
        with self._lock:
            if self._ended:
                self._dropped += 1
                return
            self._ended = body.kind == "end"
            self._entries.append(Entry(seq=self._next_seq, body=body))
            self._next_seq += 1
            while len(self._entries) > self._limit:
                self._entries.popleft()
                self._dropped += 1

    def count_dropped(self, number: int) -> None:
        """Count entries that were lost on their way here."""
        with self._lock:
            self._dropped += number

    def read(self, cursor: int, limit: int, alive_ranks: int) -> PollBatch:
        """Forget entries up to ``cursor`` and return the next ``limit``; asking again gives the same answer."""
        with self._lock:
            while self._entries and self._entries[0].seq <= cursor:
                self._entries.popleft()
            entries = tuple(islice(self._entries, max(0, limit)))
            return PollBatch(entries=entries, dropped=self._dropped, alive_ranks=alive_ranks, ended=self._ended)
