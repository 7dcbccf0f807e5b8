"""The catalogue of metrics follows Prometheus' conventions and is the only place with metric names."""

from __future__ import annotations

import re

import pytest

from tests.architecture.source import modules
from worker.contract.metrics import CATALOGUE, Metric, metric

METRIC_NAME = re.compile(r"(?<!:)\bdmuon_[a-z0-9_]*(?:_total|_seconds|_bytes|_bucket|_sum|_count)\b(?!:)")
"""Not within a recorded name, which has colons."""


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda m: m.name)
def test_conventions(entry: Metric) -> None:
    assert re.fullmatch(r"dmuon_[a-z0-9_]+", entry.name)
    assert entry.name.endswith("_total") == (entry.kind == "counter")
    if entry.unit in ("seconds", "bytes"):
        assert entry.unit in entry.name, "the name says the unit"
    assert entry.help and not entry.help.endswith(".")
    assert len(set(entry.labels)) == len(entry.labels)


def test_names_are_written_nowhere_else() -> None:
    """A metric name in code must be one of the catalogue's: a typo would be a series that nobody exports."""
    stems = {entry.name for entry in CATALOGUE}
    derived = {f"{name}{suffix}" for name in stems for suffix in ("_bucket", "_sum", "_count")}
    unknown = {}
    for module in modules("orchestrator", "dashboards", "worker"):
        names = set(
            re.findall(r"(?<!:)\bdmuon_[a-z0-9_]*(?:_total|_seconds|_bytes|_bucket|_sum|_count)\b(?!:)", module.text)
        )
        if names - stems - derived:
            unknown[module.name] = names - stems - derived
    assert not unknown


def test_lookup() -> None:
    assert metric("dmuon_loss").kind == "gauge"
    with pytest.raises(KeyError):
        metric("dmuon_lost")
