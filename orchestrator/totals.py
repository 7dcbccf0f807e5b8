"""Sums over ranks and attempts of what ranks reported. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from worker.contract.messages import RankReport

__all__ = ["CommSum", "NsSum", "comm_sums", "ns_sums", "overlap_of", "steps_with_traffic", "update_rms"]


@dataclass(slots=True)
class CommSum:
    """Communication of one route in one phase, summed over ranks (and attempts)."""

    collectives: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    payload_bytes: int = 0

    def __add__(self, other: CommSum) -> CommSum:
        return CommSum(
            self.collectives + other.collectives,
            self.seconds + other.seconds,
            self.exposed_seconds + other.exposed_seconds,
            self.payload_bytes + other.payload_bytes,
        )


@dataclass(slots=True)
class NsSum:
    """Newton-Schulz work of one kernel and algorithm, summed over ranks (and attempts)."""

    launches: int = 0
    matrices: int = 0
    seconds: float = 0.0


def comm_sums(reports: Iterable[RankReport]) -> dict[tuple[str, str], CommSum]:
    """Return the sums by (route, phase) of reports that are the last of their rank."""
    sums: dict[tuple[str, str], CommSum] = {}
    for report in reports:
        for part in report.comm:
            one = CommSum(part.collectives, part.seconds, part.exposed_seconds, part.payload_bytes)
            sums[part.route, part.phase] = sums.get((part.route, part.phase), CommSum()) + one
    return sums


def ns_sums(reports: Iterable[RankReport]) -> dict[tuple[str, str], NsSum]:
    """Return the sums by (kernel, algorithm) of reports that are the last of their rank."""
    sums: dict[tuple[str, str], NsSum] = {}
    for report in reports:
        for part in report.ns:
            total = sums.setdefault((str(part.kernel), str(part.algorithm)), NsSum())
            total.launches += part.launches
            total.matrices += part.matrices
            total.seconds += part.seconds
    return sums


def overlap_of(sums: Iterable[CommSum]) -> float | None:
    """Return the share of communication time that hid behind compute; None without communication."""
    total = sum(sums, CommSum())
    return None if total.seconds <= 0 else 1.0 - total.exposed_seconds / total.seconds


def update_rms(reports: Iterable[RankReport]) -> dict[str, float]:
    """Return the root mean square of the last update by route, over the weights of all ranks."""
    squares: dict[str, float] = {}
    elements: dict[str, int] = {}
    for report in reports:
        for part in report.routes:
            squares[part.route] = squares.get(part.route, 0.0) + part.update_square_sum
            elements[part.route] = elements.get(part.route, 0) + part.elements
    return {route: math.sqrt(squares[route] / number) for route, number in elements.items() if number}


def steps_with_traffic(phase: str, step: int, skipped: int) -> int:
    """Return how many of ``step`` steps communicated in ``phase``, ``skipped`` of them having been skipped.

    A skipped step has gathered and reduced like any other, but has no new weights to publish.
    """
    return step - skipped if phase == "publish" else step
