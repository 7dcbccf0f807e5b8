"""A job's series while they are collected, so that no job can export more of them than its budget allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrator._families import Families
from worker.contract.metrics import metric

__all__ = ["JobSeries"]


@dataclass(slots=True)
class _Family:
    series: int = 0
    adds: list[Callable[[], None]] = field(default_factory=list)


class JobSeries:
    """The series of one job. A family that does not fit the budget is left out whole: half of the ranks would give a
    wrong maximum and a wrong mean. Families by rank, which grow with the job, are the first to go."""

    def __init__(self, families: Families) -> None:
        self._target = families
        self._families: dict[str, _Family] = {}

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        """Keep a sample for :meth:`flush`."""
        self._keep(name, 1, lambda: self._target.add(name, labels, value))

    def add_buckets(
        self, name: str, labels: Sequence[str], bounds: Sequence[float], cumulative: Sequence[int], total: float
    ) -> None:
        """Keep a histogram for :meth:`flush`: a series for each bound, for all, for the sum and for the count."""
        self._keep(name, len(bounds) + 3, lambda: self._target.add_buckets(name, labels, bounds, cumulative, total))

    def _keep(self, name: str, series: int, add: Callable[[], None]) -> None:
        family = self._families.setdefault(name, _Family())
        family.series += series
        family.adds.append(add)

    def flush(self, budget: int) -> tuple[int, int]:
        """Hand over what fits in ``budget`` series; return how many were handed over and how many left out."""
        kept = dropped = 0
        for name in sorted(self._families, key=lambda each: "rank" in metric(each).labels):
            family = self._families[name]
            if kept + family.series > budget:
                dropped += family.series
                continue
            kept += family.series
            for add in family.adds:
                add()
        return kept, dropped
