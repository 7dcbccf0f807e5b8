"""What Newton-Schulz really did in this process: counted at the place of launch, by kernel and algorithm.

Totals only grow. On CUDA the seconds come from pairs of events that are read once the device has passed them, so a
snapshot never waits and may lag behind by the work in flight.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["LEDGER", "Launches", "Ledger", "NsCount", "snapshot"]

Key = tuple[str, str]
Launches = dict[Key, int]
"""Launches by (kernel, algorithm)."""


@dataclass(frozen=True, slots=True)
class NsCount:
    """Totals of one (kernel, algorithm).

    Attributes:
        launches: Symmetric products launched by the kernel.
        matrices: Matrices orthogonalised with it.
        seconds: Time of those orthogonalisations, normalisation included.
    """

    launches: int = 0
    matrices: int = 0
    seconds: float = 0.0


class Ledger:
    """Thread-safe totals by (kernel, algorithm)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Key, NsCount] = {}
        self._pending: deque[tuple[Key, torch.Event, torch.Event]] = deque()
        self._recording: Launches | None = None
        self._is_muted = False

    def count_launch(self, kernel: str, algorithm: str) -> None:
        """Count one symmetric product, after its launch returned."""
        if self._recording is not None:
            self._recording[kernel, algorithm] = self._recording.get((kernel, algorithm), 0) + 1
        else:
            self._add((kernel, algorithm), launches=1)

    @contextmanager
    def recording(self) -> Iterator[Launches]:
        """Collect launches instead of counting them: those of a graph that is being captured have not run yet."""
        assert self._recording is None, "two graphs are captured at once"
        self._recording = {}
        try:
            yield self._recording
        finally:
            self._recording = None

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Count nothing: what is measured or compiled ahead updates no weight. Not for use beside other threads."""
        before, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = before

    def add_launches(self, launches: Launches) -> None:
        """Count what the replay of a captured graph launched."""
        for key, number in launches.items():
            self._add(key, launches=number)

    @contextmanager
    def orthogonalising(self, kernel: str, algorithm: str, num_matrices: int, device: torch.device) -> Iterator[None]:
        """Time a group and count its matrices; nothing is counted when the body raises."""
        key = (kernel, algorithm)
        if self._is_muted:
            yield
            return
        if device.type == "cuda":
            first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
            first.record(torch.cuda.current_stream(device))
            yield
            last.record(torch.cuda.current_stream(device))
            with self._lock:
                self._pending.append((key, first, last))
            self._add(key, matrices=num_matrices)
            return
        begin = time.perf_counter()
        yield
        self._add(key, matrices=num_matrices, seconds=time.perf_counter() - begin)

    def snapshot(self) -> dict[Key, NsCount]:
        """Return the totals so far; never synchronises a device."""
        with self._lock:
            self._settle()
            return dict(self._counts)

    def _add(self, key: Key, *, launches: int = 0, matrices: int = 0, seconds: float = 0.0) -> None:
        if self._is_muted:
            return
        with self._lock:
            self._settle()
            self._bump(key, launches, matrices, seconds)

    def _bump(self, key: Key, launches: int, matrices: int, seconds: float) -> None:
        old = self._counts.get(key, NsCount())
        self._counts[key] = NsCount(old.launches + launches, old.matrices + matrices, old.seconds + seconds)

    def _settle(self) -> None:
        while self._pending and self._pending[0][2].query():
            key, first, last = self._pending.popleft()
            self._bump(key, 0, 0, first.elapsed_time(last) / 1e3)


LEDGER = Ledger()
"""The ledger of this process, which all kernels write to."""


def snapshot() -> dict[Key, NsCount]:
    """Totals of this process by (kernel, algorithm)."""
    return LEDGER.snapshot()
