"""The scaling benchmark, dry: gloo on four and eight processes, tiny shapes; what it counts is what was planned."""

from __future__ import annotations

import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

from benchmarks import _scaling_plot, common, scaling, step
from benchmarks._tracing import steps_annotated
from benchmarks._turns import Runner
from benchmarks._verdicts import losses_apart
from benchmarks.contestants import BUILDERS
from benchmarks.scaling import Layout, layouts_of
from benchmarks.workloads import WORKLOADS
from dmuon_runtime.chips import H200
from tests.multiproc.harness import run_ranks

Rows = list[dict[str, Any]]
Found = tuple[Rows, dict[str, list[float]]]
ONLY = ("fsdp2 + adamw Z3", "ours pure Z3", "ours hybrid Z2", "ddp + adamw", "ours replicated")


def dry(layouts: list[Layout], only: tuple[str, ...]) -> Found:
    """What every rank gets."""
    return scaling.run(WORKLOADS["tiny"], layouts, torch.device("cpu"), (1, 1), only)


def dry_both() -> tuple[Found, list[int], Rows, list[list[str]]]:
    """What each of four ranks gets: scaling rows, how many whenever they were kept, a step's rows, annotations."""
    kept: list[int] = []
    found = scaling.run(
        WORKLOADS["tiny"], layouts_of(4), torch.device("cpu"), (1, 1), ONLY, lambda rows, _: kept.append(len(rows))
    )
    options = step._parse(["--rounds", "1", "--steps", "1", "--only", ",".join((*ONLY[:3], "fsdp2 + adamw Z2"))])
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return found, kept, step.run(options, grid, torch.device("cpu")), annotations(grid)


def annotations(grid: DeviceMesh) -> list[list[str]]:
    """What a trace of a step of ours names, and of one behind it."""
    workload, cpu = WORKLOADS["tiny"], torch.device("cpu")
    ours = BUILDERS["ours pure"](workload.build(cpu), grid, True, torch.float32)
    runner, found = Runner("ours pure Z3", ours, workload, cpu), []
    for annotated in (steps_annotated(ours), nullcontext()):
        with annotated, profile(activities=[ProfilerActivity.CPU]) as taken:
            runner.step()
        names = [event.key for event in taken.key_averages()]
        found.append([name for name in names if name.startswith(("step:", "dmuon"))])
    return found


@pytest.fixture(scope="module")
def both() -> tuple[Found, list[int], Rows, list[list[str]]]:
    return run_ranks(4, dry_both, deadline_s=150.0)[0]


@pytest.fixture(scope="module")
def four(both: tuple[Found, list[int], Rows, list[list[str]]]) -> Found:
    return both[0]


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
def test_four_processes(four: Found) -> None:
    rows, losses = four
    assert [(row["layout"], row["contestant"]) for row in rows] == [
        *((layout, name) for layout in ("1x4", "2x2") for name in (ONLY[0], ONLY[1], ONLY[2])),
        ("replicated", ONLY[3]), ("replicated", ONLY[4]),
    ]  # fmt: skip
    expect_as_planned(rows, 4)
    overheads = {row["contestant"]: row["overhead %"] for row in rows if row["layout"] == "2x2"}
    assert overheads[ONLY[0]] == 0 and overheads[ONLY[1]] is not None
    assert overheads[ONLY[2]] is None, "without AdamW of its own Z mode nothing is compared"
    assert not losses_apart(rows, 1e-5), "all start from the same weights, and ours trains the same on each mesh"
    reference = losses["1x4"]
    assert reference[-1] < reference[0] - 0.1, "it learns"
    for layout in ("2x2", "replicated"):
        assert losses[layout] == pytest.approx(reference, rel=1e-5), layout


@pytest.mark.multiproc
def test_what_was_measured_is_kept_at_once(both: tuple[Found, list[int], Rows, list[list[str]]]) -> None:
    assert both[1] == [2, 3, 5, 6, 8], "after every group of contestants"


@pytest.mark.multiproc
def test_a_step_on_replicas(both: tuple[Found, list[int], Rows, list[list[str]]]) -> None:
    rows = both[2]
    names = [row["contestant"] for row in rows]
    assert names == ["fsdp2 + adamw Z3", "ours pure Z3", "fsdp2 + adamw Z2", "ours hybrid Z2"]
    assert not losses_apart(rows, 1e-5)
    assert [row["over adamw"] for row in rows[::2]] == [1.0, 1.0] and all(row["over adamw"] > 0 for row in rows)
    phases = {key.partition("/")[2] for key in rows[1]["counted"]["communication"]}
    assert phases == {"forward", "backward", "reduce", "publish"}
    shares = rows[1]["counted"]["exposed, share of the step"]
    assert set(shares) == phases and all(0 <= share < 1 for share in shares.values())


@pytest.mark.multiproc
def test_a_traced_step_says_what_every_collective_is_for(both: tuple[Found, list[int], Rows, list[list[str]]]) -> None:
    inside, behind = both[3]
    assert {name for name in inside if name.startswith("step:")} == {"step:forward", "step:backward", "step:update"}
    keys = {name.partition("#")[0].partition(":")[2] for name in inside if name.startswith("dmuon:")}
    phases = ("forward", "backward", "reduce")
    routes = {f"{route}/{phase}" for route in ("muon", "adamw", "sharded_adamw") for phase in phases}
    assert routes - {"sharded_adamw/backward"} <= keys and "muon/publish" in keys
    assert behind == []
    assert all(row["exposed ms"] is None for row in both[2]), "no GPU, nothing traced"


@pytest.mark.multiproc
def test_eight_processes(four: Found) -> None:
    (rows, losses), *_ = run_ranks(8, dry, [Layout(2, 4)], ONLY[1:2], deadline_s=150.0)
    expect_as_planned(rows, 8)
    assert losses["2x4"] == pytest.approx(four[1]["1x4"], rel=1e-5), "more ranks, the same training"


@pytest.mark.multiproc
def test_report_and_picture(four: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.parent.mkdir()
    monkeypatch.setattr(common, "RESULTS", folder)
    monkeypatch.setattr(scaling.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(scaling.dist, "get_rank", lambda: 0)
    scaling._keep(*four, "tiny", 3, {"replicated": "too large"})
    assert scaling._report(*four, "tiny", 4, torch.device("cpu")) == 0
    results = _scaling_plot.results_of("tiny", folder)
    _scaling_plot.plot(results, tmp_path / "picture.png", "nvidia-h200")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert _scaling_plot.compare_losses(results) == 0
    (file,) = folder.iterdir()
    broken = json.loads(file.read_text())
    assert broken["batch"] == 3
    few, many = (_scaling_plot.predicted_rows([broken | {"batch": n}], H200)[0]["predicted %"] for n in (1, 10_000))
    assert 0 < many < few, "the same update in a longer step"
    assert broken["left_out"] == {"replicated": "too large"}
    assert {target["what"] for target in broken["targets"]} == {
        "owners, measured max over mean", "publishing exposed, share of the step, counted",
    }  # fmt: skip
    broken["same_batch_losses"]["2x2"][-1] *= 1.01
    assert _scaling_plot.compare_losses([broken]) == 1
    with pytest.raises(FileNotFoundError, match=r"no scaling-llama-\*"):
        _scaling_plot.results_of("llama", folder)


def test_a_contestant_without_a_z_mode_is_meant_in_both() -> None:
    assert step._chosen("ours pure, fsdp2 + adamw Z2") == ["fsdp2 + adamw Z2", "ours pure Z3", "ours pure Z2"]
    with pytest.raises(SystemExit, match="--only names adamw; there are fsdp2"):
        step._parse(["--only", "adamw"])


def test_traced_steps_are_none_or_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert step._parse(["--trace-steps", "0"]).trace_steps == 0
    for benchmark in (step, scaling):
        with pytest.raises(SystemExit):
            benchmark._parse(["--trace-steps", "-1"])
        assert "must be at least 0, not -1" in capsys.readouterr().err


def test_layouts() -> None:
    assert [layout.name for layout in layouts_of(1)] == ["1x1"]
    assert [layout.name for layout in layouts_of(8)] == ["1x8", "2x4", "replicated"]
    assert layouts_of(8, "4x2,replicated") == [Layout(4, 2), Layout(1, 8, replicated=True)]
    with pytest.raises(ValueError, match="'2x2' is neither"):
        layouts_of(8, "2x2")


def test_a_model_too_large_for_every_rank_to_keep_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device, h200 = torch.device("cuda", 0), SimpleNamespace(total_memory=143_771 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    large, whole = WORKLOADS["llama-3.1-8b"], Layout(1, 8, replicated=True)
    assert "150 GiB, and the device has 140" in (scaling.too_large(whole, large, device) or "")
    assert scaling.too_large(Layout(1, 8), large, device) is None
    assert scaling.too_large(whole, WORKLOADS["llama-3.2-3b"], device) is None
