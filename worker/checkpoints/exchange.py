"""Short texts between the ranks through the job's store: usable from any thread, and before and after collectives."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

__all__ = ["Exchange"]

_POLL_S = 0.01


class Exchange:
    """Every rank posts under a topic; who wants waits for the others.

    Waiting asks again and again: a blocking wait would hold the connection that other threads of this process share.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._timeout_s = store, timeout_s

    def post(self, topic: str, text: str) -> None:
        """Say ``text`` under ``topic``, once for each topic and rank."""
        self._store.set(f"{topic}/{self.rank}", text or " ")

    def read(self, topic: str, rank: int) -> str:
        """Return what ``rank`` said.

        Raises:
            TimeoutError: it said nothing in time.
        """
        key, deadline = f"{topic}/{rank}", time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} said nothing about {topic} within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        self._store.wait([key], timedelta(seconds=self._timeout_s))
        return self._store.get(key).decode().strip()

    def all(self, topic: str, text: str) -> list[str]:
        """Post, and return what every rank said, by rank."""
        self.post(topic, text)
        return [self.read(topic, rank) for rank in range(self.world_size)]
