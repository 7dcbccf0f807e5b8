"""Families of the catalogue while they are being filled. Nothing outside the catalogue can be added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

from orchestrator.timings import Histogram
from worker.contract.metrics import CATALOGUE, metric

__all__ = ["Families"]


class Families:
    """One family for each entry of the catalogue."""

    def __init__(self) -> None:
        self._simple: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        self._histograms: dict[str, HistogramMetricFamily] = {}
        for entry in CATALOGUE:
            if entry.kind == "histogram":
                self._histograms[entry.name] = HistogramMetricFamily(entry.name, entry.help, labels=entry.labels)
            elif entry.kind == "counter":
                self._simple[entry.name] = CounterMetricFamily(entry.name, entry.help, labels=entry.labels)
            else:
                self._simple[entry.name] = GaugeMetricFamily(entry.name, entry.help, labels=entry.labels)

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        """Add a sample; ``labels`` are values in the order of the catalogue."""
        assert len(labels) == len(metric(name).labels), f"{name} has labels {metric(name).labels}, got {labels}"
        self._simple[name].add_metric(list(map(str, labels)), float(value))

    def add_buckets(
        self, name: str, labels: Sequence[str], bounds: Sequence[float], cumulative: Sequence[int], total: float
    ) -> None:
        """Add a histogram; ``cumulative`` has one count for each bound and the count of all."""
        assert len(cumulative) == len(bounds) + 1, f"{name}: {len(bounds)} bounds, {len(cumulative)} counts"
        edges = [*map(floatToGoString, bounds), "+Inf"]
        pairs = [(edge, float(count)) for edge, count in zip(edges, cumulative, strict=True)]
        self._histograms[name].add_metric(list(map(str, labels)), buckets=pairs, sum_value=total)

    def add_histogram(self, name: str, histogram: Histogram) -> None:
        """Add what this process measured."""
        for labels, (counts, total) in histogram.snapshot().items():
            cumulative = [sum(counts[: index + 1]) for index in range(len(counts))]
            self.add_buckets(name, labels, histogram.bounds, cumulative, total)

    def all(self) -> Iterable[Family]:
        """Return the families in the order of the catalogue."""
        return [self._histograms.get(entry.name) or self._simple[entry.name] for entry in CATALOGUE]
