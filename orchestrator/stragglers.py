"""Which rank the others wait for: time in steps by rank, without what it waited for communication. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.contract.messages import RankReport

__all__ = ["Pace", "paces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One rank over the last steps; seconds are means of a step."""

    rank: int
    steps: int
    """How many steps the means are of."""
    own_s: float
    """In steps and not waiting for a collective: what this rank makes others wait for."""
    waited_s: float
    """Waiting for collectives."""
    slowdown_ratio: float
    """``own_s`` over the median of all ranks; 1 is like the others."""


def paces(first: Mapping[int, RankReport], last: Sequence[RankReport]) -> list[Pace]:
    """Return the pace of every rank in ``last``, by rank; empty for a baseline, whose waits nobody counts.

    Args:
        first: an earlier report of the same attempt by rank; a rank without one counts from its attempt's first step.
        last: the newest report of each rank.
    """
    found = []
    for report in sorted(last, key=lambda one: one.rank):
        if report.owner_compute_seconds is None:
            return []
        before = first.get(report.rank)
        steps = report.step - (report.first_step if before is None else before.step)
        if steps <= 0:
            continue
        seconds = report.step_seconds_sum - (0.0 if before is None else before.step_seconds_sum)
        waited = _exposed(report) - (0.0 if before is None else _exposed(before))
        found.append((report.rank, steps, max(0.0, seconds - waited) / steps, waited / steps))
    median = statistics.median(own for _, _, own, _ in found) if found else 0.0
    return [
        Pace(rank=rank, steps=steps, own_s=own, waited_s=waited, slowdown_ratio=own / median if median else 1.0)
        for rank, steps, own, waited in found
    ]


def _exposed(report: RankReport) -> float:
    return sum(total.exposed_seconds for total in report.comm)
