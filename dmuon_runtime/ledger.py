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

__all__ = ["LEDGER", "Launches", "Ledger", "NsCount", "Trial", "snapshot"]

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


@dataclass(slots=True)
class _Total:
    launches: int = 0
    matrices: int = 0
    seconds: float = 0.0


class Trial:
    """Matrices that were orthogonalised, and are counted only when the results are kept."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.matrices: Launches = {}

    def keep(self) -> None:
        """Count them: the results are applied."""
        matrices, self.matrices = self.matrices, {}
        for key, number in matrices.items():
            self._ledger.add_matrices(key, number)


class _Local(threading.local):
    """What holds for one thread alone: others may launch, measure or capture at the same time."""

    is_muted = False
    is_comparing = False
    recording: Launches | None = None
    trial: Trial | None = None


class Ledger:
    """Thread-safe totals by (kernel, algorithm)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Key, _Total] = {}
        self._pending: deque[tuple[Key, torch.Event, torch.Event]] = deque()
        self._launched: Launches = {}
        """Launches of which :attr:`_counts` does not know yet: this is the place that is passed most often."""
        self._compared: Launches = {}
        self._local = _Local()

    def count_launch(self, kernel: str, algorithm: str) -> None:
        """Count one symmetric product, after its launch returned."""
        self.add_launches({(kernel, algorithm): 1})

    @contextmanager
    def recording(self) -> Iterator[Launches]:
        """Collect launches instead of counting them: those of a graph that is being captured have not run yet."""
        assert self._local.recording is None, "two graphs are captured at once"
        recording: Launches = {}
        self._local.recording = recording
        try:
            yield recording
        finally:
            self._local.recording = None

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Count nothing of this thread: what is measured or compiled ahead updates no weight."""
        before, self._local.is_muted = self._local.is_muted, True
        try:
            yield
        finally:
            self._local.is_muted = before

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Count the launches of this thread apart from those that do the work: their results are only looked at."""
        before, self._local.is_comparing = self._local.is_comparing, True
        try:
            yield
        finally:
            self._local.is_comparing = before

    def compared(self) -> Launches:
        """Return the launches of comparisons so far."""
        with self._lock:
            return dict(self._compared)

    @contextmanager
    def trial(self) -> Iterator[Trial]:
        """Hold back the count of matrices of this thread, but not of launches: results may yet be thrown away."""
        before = self._local.trial
        self._local.trial = trial = Trial(self)
        try:
            yield trial
        finally:
            self._local.trial = before

    def add_matrices(self, key: Key, number: int) -> None:
        """Count matrices, or hand them to the trial in progress."""
        trial = self._local.trial
        if trial is None or self._local.is_muted:
            self._add(key, matrices=number)
        else:
            trial.matrices[key] = trial.matrices.get(key, 0) + number

    def add_launches(self, launches: Launches) -> None:
        """Count launches that were made, by whichever call or by the replay of a captured graph."""
        local = self._local
        counts = local.recording
        if counts is None:
            if local.is_muted:
                return
            counts = self._compared if local.is_comparing else self._launched
        with self._lock:
            for key, number in launches.items():
                counts[key] = counts.get(key, 0) + number

    @contextmanager
    def orthogonalising(self, kernel: str, algorithm: str, num_matrices: int, device: torch.device) -> Iterator[None]:
        """Time a group and count its matrices; nothing is counted when the body raises."""
        key = (kernel, algorithm)
        if self._local.is_muted or self._local.is_comparing:
            yield
            return
        if device.type == "cuda":
            first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
            first.record(torch.cuda.current_stream(device))
            yield
            last.record(torch.cuda.current_stream(device))
            with self._lock:
                self._pending.append((key, first, last))
            self.add_matrices(key, num_matrices)
            return
        begin = time.perf_counter()
        yield
        self._add(key, seconds=time.perf_counter() - begin)
        self.add_matrices(key, num_matrices)

    def snapshot(self) -> dict[Key, NsCount]:
        """Return the totals so far; never synchronises a device."""
        with self._lock:
            self._settle()
            return {key: NsCount(each.launches, each.matrices, each.seconds) for key, each in self._counts.items()}

    def _add(self, key: Key, *, matrices: int = 0, seconds: float = 0.0) -> None:
        if self._local.is_muted:
            return
        with self._lock:
            self._settle()
            self._bump(key, 0, matrices, seconds)

    def _bump(self, key: Key, launches: int, matrices: int, seconds: float) -> None:
        total = self._counts.get(key)
        if total is None:
            total = self._counts[key] = _Total()
        total.launches += launches
        total.matrices += matrices
        total.seconds += seconds

    def _settle(self) -> None:
        for key, launches in self._launched.items():
            self._bump(key, launches, 0, 0.0)
        self._launched.clear()
        while self._pending and self._pending[0][2].query():
            key, first, last = self._pending.popleft()
            self._bump(key, 0, 0, first.elapsed_time(last) / 1e3)


LEDGER = Ledger()
"""The ledger of this process, which all kernels write to."""


def snapshot() -> dict[Key, NsCount]:
    """Totals of this process by (kernel, algorithm)."""
    return LEDGER.snapshot()
