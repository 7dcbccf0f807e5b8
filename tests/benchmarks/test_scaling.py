"""The scaling benchmark, dry: gloo on four and eight processes, tiny shapes; what it counts is what was planned."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _scaling_plot, common, scaling
from benchmarks.scaling import Layout, layouts_of
from benchmarks.workloads import WORKLOADS
from tests.multiproc.harness import run_ranks

Found = tuple[list[dict[str, Any]], dict[str, list[float]]]
ONLY = ("fsdp2 + adamw Z3", "ours pure Z3", "ours hybrid Z2", "ddp + adamw", "ours replicated")


def dry(layouts: list[Layout], only: tuple[str, ...]) -> Found:
    """What every rank gets."""
    return scaling.run(WORKLOADS["tiny"], layouts, torch.device("cpu"), 1, only)


@pytest.fixture(scope="module")
def four() -> list[Found]:
    return run_ranks(4, dry, layouts_of(4), ONLY, deadline_s=150.0)


def expect_as_planned(rows: list[dict[str, Any]], world_size: int) -> None:
    ours = [row for row in rows if row["contestant"].startswith("ours")]
    assert ours
    for row in ours:
        what = f"{row['layout']} {row['contestant']}"
        assert row["matrices"] == row["planned matrices"] and sum(row["matrices"]) == 14, what
        assert all(entry["bytes"] == entry["planned bytes"] > 0 for entry in row["communication"].values()), what
        cost, owner_ms = row["planned cost"], row["owner ms"]
        assert len(cost) == len(owner_ms) == world_size and min(owner_ms) > 0, what
        assert row["owner balance planned"] == pytest.approx(max(cost) / statistics.mean(cost)), what
        assert row["owner balance measured"] == pytest.approx(max(owner_ms) / statistics.mean(owner_ms)), what
        assert 0 < row["newton-schulz ms"] <= row["step ms"] * 1.01, what
    phases = {key.partition("/")[2] for row in ours for key in row["communication"] if row["layout"] == "1x4"}
    assert not phases & {"publish"}, "nobody to publish to on a 1-D mesh"


@pytest.mark.multiproc
def test_four_processes(four: list[Found]) -> None:
    rows, losses = four[0]
    assert [(row["layout"], row["contestant"]) for row in rows] == [
        *((layout, name) for layout in ("1x4", "2x2") for name in (ONLY[0], ONLY[1], ONLY[2])),
        ("replicated", ONLY[3]), ("replicated", ONLY[4]),
    ]  # fmt: skip
    expect_as_planned(rows, 4)
    overheads = {row["contestant"]: row["overhead %"] for row in rows if row["layout"] == "2x2"}
    assert overheads[ONLY[0]] == 0 and overheads[ONLY[1]] is not None
    assert overheads[ONLY[2]] is None, "without AdamW of its own Z mode nothing is compared"
    firsts = {round(row["first losses"][0], 4) for row in rows}
    assert len(firsts) == 1, "all start from the same weights"
    reference = losses["1x4"]
    assert reference[-1] < reference[0] - 0.1, "it learns"
    for layout in ("2x2", "replicated"):
        assert losses[layout] == pytest.approx(reference, rel=1e-5), layout


@pytest.mark.multiproc
def test_eight_processes(four: list[Found]) -> None:
    (rows, losses), *_ = run_ranks(8, dry, [Layout(2, 4)], ONLY[1:2], deadline_s=150.0)
    expect_as_planned(rows, 8)
    assert losses["2x4"] == pytest.approx(four[0][1]["1x4"], rel=1e-5), "more ranks, the same training"


@pytest.mark.multiproc
def test_report_and_picture(four: list[Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.parent.mkdir()
    monkeypatch.setattr(common, "RESULTS", folder)
    scaling._report(*four[0], "tiny", 4)
    results = _scaling_plot.results_of("tiny", folder)
    _scaling_plot.plot(results, tmp_path / "picture.png", "nvidia-h200")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert _scaling_plot.compare_losses(results) == 0
    (file,) = folder.iterdir()
    broken = json.loads(file.read_text())
    broken["same_batch_losses"]["2x2"][-1] *= 1.01
    assert _scaling_plot.compare_losses([broken]) == 1
    with pytest.raises(FileNotFoundError, match=r"no scaling-llama-\*"):
        _scaling_plot.results_of("llama", folder)


def test_layouts() -> None:
    assert [layout.name for layout in layouts_of(1)] == ["1x1"]
    assert [layout.name for layout in layouts_of(8)] == ["1x8", "2x4", "replicated"]
    assert layouts_of(8, "4x2,replicated") == [Layout(4, 2), Layout(1, 8, replicated=True)]
    with pytest.raises(ValueError, match="'2x2' is neither"):
        layouts_of(8, "2x2")
