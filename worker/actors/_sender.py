"""How a rank tells its supervisor: on disk at once, to the supervisor in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import ray

from worker.contract.messages import AttemptStart, Entry, Milestone, RankError, RankReport
from worker.contract.reports import attempt_folder, rank_files
from worker.journal import Journal

__all__ = ["Sender", "rank_journal"]

_BATCH = 512
_FLUSH_S = 5.0
_AGAIN_S = 1.0


def rank_journal(attempt: AttemptStart, rank: int) -> tuple[Journal | None, str]:
    """Open what a rank keeps of what it tells; without one, the reason comes back, or nothing where none is wanted."""
    if not attempt.report_directory:
        return None, ""
    try:
        return Journal(rank_files(attempt_folder(Path(attempt.report_directory), attempt.attempt), rank)), ""
    except OSError as error:  # training is worth more
        return None, f"what rank {rank} tells is not kept in {attempt.report_directory}: {error}"


class Sender:
    """Sends what a rank tells in batches, from a thread of its own: training never waits for the supervisor.

    What cannot be sent is sent again, and taken once by its number. The queue is bounded; when it is full the oldest
    go, and the next batch says how many.
    """

    def __init__(self, supervisor: Any, fence: str, limit: int, rank: int, journal: Journal | None = None) -> None:
        self._supervisor, self._fence, self._limit = supervisor, fence, limit
        self._rank, self._journal, self._number = rank, journal, 0
        self._queue: deque[str] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._send_all, name="reports", daemon=True)
        self._thread.start()

    def put(self, body: RankReport | Milestone | RankError) -> None:
        """Keep ``body`` on disk and queue it; returns at once."""
        problem = ""
        with self._changed:
            self._number += 1
            text = Entry(seq=0, rank=self._rank, number=self._number, body=body).model_dump_json()
            problem = self._keep(text)
            self._queue.append(text)
            self._shorten()
            self._changed.notify()
        if problem:
            self.put(Milestone(name="reports_off", at=time.time(), message=problem, rank=self._rank))

    def close(self) -> None:
        """Send what is left, for a bounded time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_FLUSH_S)

    def _keep(self, text: str) -> str:
        """Write to disk; return why that does not work any more, once."""
        if self._journal is not None:
            try:
                self._journal.append(text)
            except OSError as error:
                self._journal = None
                return f"what rank {self._rank} tells is not kept on disk any more: {error}"
        return ""

    def _shorten(self) -> None:
        while len(self._queue) > self._limit:
            self._queue.popleft()
            self._dropped += 1

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closing)
                if not self._queue:
                    return
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                dropped, self._dropped = self._dropped, 0
            try:
                ray.get(self._supervisor.push.remote(self._fence, batch, dropped), timeout=60)
            except Exception:  # the supervisor is gone or stuck: training goes on
                with self._changed:
                    self._dropped += dropped
                    self._queue.extendleft(reversed(batch))
                    self._shorten()
                    if self._closing:
                        return
                time.sleep(_AGAIN_S)
