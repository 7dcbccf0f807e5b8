"""Cumulative totals of what really happened: collectives, bytes and seconds by route and phase, and owner compute.

A collective and its bytes count from when it is issued. Its seconds follow when they are known: a
:class:`~dmuon_runtime.spans.Span` that is not finished yet is asked again at the next snapshot, so nothing waits.
Between products of matrices no other code is warm in the caches, and what runs 50 times a step costs several times what
it costs in a loop: so a collective is noted in a queue, and the sums are made at the snapshot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dmuon_runtime.policy import Route
from dmuon_runtime.spans import Span

__all__ = ["CommCount", "Counters", "CountersSnapshot"]

Key = tuple[Route, str]


@dataclass(frozen=True)
class CommCount:
    """Totals of one route in one phase on this rank."""

    collectives: int = 0
    seconds: float = 0.0
    """Time between start and end of the collectives."""
    exposed_seconds: float = 0.0
    """The part of it for which compute waited."""
    payload_bytes: int = 0


@dataclass(frozen=True)
class CountersSnapshot:
    """Totals since the model was dedicated, on this rank."""

    comm: dict[Key, CommCount]
    control: CommCount
    """Agreement, norms and flags: small, and no part of any route."""
    owner_compute_seconds: float
    ns_planned_matrices: int
    """Matrices that this rank's share of the plan handed to Newton-Schulz."""
    pending_spans: int
    """Collectives whose seconds are not in yet."""


@dataclass(slots=True)
class _Total:
    collectives: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    payload_bytes: int = 0

    def freeze(self) -> CommCount:
        return CommCount(self.collectives, self.seconds, self.exposed_seconds, self.payload_bytes)


@dataclass
class Counters:
    """The mutable totals behind :meth:`snapshot`; one object for each dedicated model."""

    _totals: dict[Key | None, _Total] = field(default_factory=dict)
    _issued: deque[tuple[Key | None, int, Span]] = field(default_factory=deque)
    """Issued since the last look."""
    _pending: deque[tuple[Key | None, Span]] = field(default_factory=deque)
    _compute: deque[Span] = field(default_factory=deque)
    _owner_compute_seconds: float = 0.0
    _ns_planned_matrices: int = 0

    def add_collective(self, key: Key | None, payload_bytes: int, span: Span) -> None:
        """Count one collective that was just issued; ``key`` None is control traffic."""
        self._issued.append((key, payload_bytes, span))
        if len(self._issued) > 256:  # bounds the queue when nobody takes snapshots
            self._harvest()

    def add_owner_compute(self, span: Span, num_matrices: int) -> None:
        """Count one optimizer update of what this rank owns, with the matrices planned for it."""
        self._compute.append(span)
        self._ns_planned_matrices += num_matrices

    def snapshot(self) -> CountersSnapshot:
        """Return the totals as values; waits for nothing."""
        self._harvest()
        return CountersSnapshot(
            comm={key: total.freeze() for key, total in self._totals.items() if key is not None},
            control=self._totals.get(None, _Total()).freeze(),
            owner_compute_seconds=self._owner_compute_seconds,
            ns_planned_matrices=self._ns_planned_matrices,
            pending_spans=len(self._pending) + len(self._compute),
        )

    def owner_compute_seconds(self) -> float:
        """Return the seconds of the updates that the device has done, which it does in order; waits for nothing."""
        while self._compute:
            seconds = self._compute[0].seconds()
            if seconds is None:
                break
            self._compute.popleft()
            self._owner_compute_seconds += seconds
        return self._owner_compute_seconds

    def settle(self) -> None:
        """Wait for one collective after the other, up to the first for which compute does not wait yet, and take their
        seconds as they end.

        For a host that is about to wait for the device: what a snapshot would ask afterwards, while the device has
        nothing to do, is asked while it works.
        """
        self._take_up()
        while self._pending and self._pending[0][1].settle():
            self._add(*self._pending.popleft())

    def _take_up(self) -> None:
        """Count what was issued since the last look."""
        while self._issued:
            key, payload_bytes, span = self._issued.popleft()
            total = self._totals.get(key)
            if total is None:
                total = self._totals[key] = _Total()
            total.collectives += 1
            total.payload_bytes += payload_bytes
            self._pending.append((key, span))

    def _add(self, key: Key | None, span: Span) -> bool:
        """Add the seconds of a span if they are known, and tell whether they are."""
        seconds = span.seconds()
        if seconds is None:
            return False
        self._totals[key].seconds += seconds
        self._totals[key].exposed_seconds += span.exposed_seconds()
        span.release()
        return True

    def _harvest(self) -> None:
        self._take_up()
        for _ in range(len(self._pending)):
            entry = self._pending.popleft()
            if not self._add(*entry):
                self._pending.append(entry)
        self.owner_compute_seconds()
