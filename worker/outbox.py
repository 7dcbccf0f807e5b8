"""The bounded outbox of an attempt: what the ranks told, numbered, until the control plane has read it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import islice

from worker.contract.messages import AttemptEnd, Entry, Milestone, PollBatch, RankError, RankReport

__all__ = ["Outbox"]


class Outbox:
    """Entries in order, numbered from 1 without gaps; the oldest leave when it is full, and are counted.

    Nothing enters after the end of the attempt. What ranks tell has numbers of theirs, and enters once; they keep it on
    disk themselves. What the supervisor tells goes to ``keep`` first.
    """

    def __init__(self, limit: int, keep: Callable[[str], None] = lambda _line: None) -> None:
        self._limit, self._keep = max(1, limit), keep
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._next_seq = 1
        self._dropped = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """True when the last entry is in."""
        return self._ended

    def append(
        self, body: RankReport | Milestone | RankError | AttemptEnd, rank: int | None = None, number: int | None = None
    ) -> bool:
        """Number ``body`` and keep it; after the end it is dropped and counted. False: it was here before."""
        with self._lock:
            if rank is not None and number is not None:
                if number <= self._numbers.get(rank, 0):
                    return False
                self._numbers[rank] = number
            if self._ended:
                self._dropped += 1
                return True
            self._ended = body.kind == "end"
            entry = Entry(seq=self._next_seq, rank=rank, number=number, body=body)
            if rank is None:
                self._keep(entry.model_dump_json())
            self._entries.append(entry)
            self._next_seq += 1
            while len(self._entries) > self._limit:
                self._entries.popleft()
                self._dropped += 1
            return True

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
