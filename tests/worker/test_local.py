"""Whole runs without Ray: the same weights for any number of workers, reports that add up, failures that end all."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.specs import tiny_document, tiny_spec
from worker.contract.kernels import Kernel
from worker.contract.messages import Milestone, RankReport
from worker.contract.states import Reason
from worker.local import Body, run_local

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(document: dict[str, Any], directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = directory / "spec.json"
    file.write_text(json.dumps(document))
    command = [sys.executable, "-m", "worker", "run", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)


def reports(done: subprocess.CompletedProcess[str]) -> list[RankReport]:
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [RankReport.model_validate(line) for line in lines if line["kind"] == "rank_report"]


def trained(
    world_size: int, micro_batch: int, saved: Path, replicate: int = 1
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses of five steps, every rank's first step having been what its plan says."""
    training = {"steps": 5, "global_batch": 12, "micro_batch": micro_batch, "clip_grad_norm": 1.0}
    told: list[Body] = []
    optimizer = {"muon": {"lr": 0.0005}, "adamw": {"lr": 0.0001}}
    mesh = {"replicate": replicate, "shard": world_size // replicate}
    end = run_local(tiny_spec(training=training, optimizer=optimizer, mesh=mesh), told.append, save=saved)
    assert end.reason == Reason.COMPLETED, end
    verified = [body for body in told if isinstance(body, Milestone) and body.name == "routes_verified"]
    assert [body.rank for body in verified] == [0] and verified[0].data["ok"], "a rank that differs says so itself"
    losses = [body.loss for body in told if isinstance(body, RankReport) and body.rank == 0]
    return torch.load(saved, weights_only=True), losses


@pytest.mark.timeout(400)
def test_any_number_of_workers_reaches_the_same_weights(tmp_path: Path) -> None:
    """A worker's share is a micro batch of the single worker, so gradients are summed from the same parts.

    The order of the sum still differs beyond two workers, and Newton-Schulz lifts rounding in the small directions of a
    gradient some hundredfold. At the rates here weights move by some percent in all: 1e-5 is far below one step.
    """
    for world_size, replicate in ((2, 1), (3, 1), (4, 1), (4, 2)):
        share = 12 // world_size
        single, expected_losses = trained(1, share, tmp_path / "single.pt")
        weights, losses = trained(world_size, share, tmp_path / "many.pt", replicate)
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        expected, found = (torch.cat([value.flatten() for value in state.values()]) for state in (single, weights))
        difference = float((found - expected).norm() / expected.norm())
        assert difference < 1e-5, f"{world_size} workers, {replicate} replicas: {difference}"


def test_a_grid_of_two_by_two_reaches_the_weights_of_one_worker(tmp_path: Path) -> None:
    """The same spec through the command line, the mesh alone being another."""
    states = []
    for name, mesh, share in (("one", {}, 3), ("grid", {"replicate": 2, "shard": 2}, 3)):
        training = {"steps": 3, "global_batch": 12, "micro_batch": share, "clip_grad_norm": 1.0}
        optimizer = {"muon": {"lr": 0.0005}, "adamw": {"lr": 0.0001}}
        saved = tmp_path / f"{name}.pt"
        document = tiny_document(mesh=mesh, training=training, optimizer=optimizer)
        done = run(document, tmp_path, "--json", "--save", str(saved))
        assert done.returncode == 0, done.stderr
        states.append(torch.cat([value.flatten() for value in torch.load(saved, weights_only=True).values()]))
    assert float((states[1] - states[0]).norm() / states[0].norm()) < 1e-5


def test_reports_add_up(tmp_path: Path) -> None:
    training: dict[str, Any] = {"steps": 4, "global_batch": 12, "micro_batch": 3, "clip_grad_norm": 0.5}
    training["schedule"] = {"kind": "linear", "warmup_steps": 2}
    done = run(tiny_document(2, training=training, kernels={"kernel": "blocked"}), tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    entries = reports(done)
    by_rank = [[entry for entry in entries if entry.rank == rank] for rank in (0, 1)]
    assert [[entry.step for entry in own] for own in by_rank] == [[1, 2, 3, 4]] * 2
    assert [entry.loss for entry in by_rank[0]] == [entry.loss for entry in by_rank[1]], "the same on every rank"
    assert [entry.grad_norm for entry in by_rank[0]] == [entry.grad_norm for entry in by_rank[1]]
    last = [own[-1] for own in by_rank]
    assert sum(entry.tokens_total for entry in last) == 4 * 12 * 32
    assert sum(total.matrices for entry in last for total in entry.ns) == 4 * 14
    assert (
        {total.kernel.value for entry in last for total in entry.ns} == {"blocked"} == {e.kernel.value for e in entries}
    )
    assert all(sum(entry.step_seconds_buckets) == 4 for entry in last)
    assert [entry.lr["muon"] for entry in by_rank[0]] == pytest.approx([0.01, 0.02, 0.01, 0.0])
    assert [entry.lr["adamw"] for entry in by_rank[0]] == pytest.approx([0.0005, 0.001, 0.0005, 0.0])
    assert {stats.route for entry in last for stats in entry.routes} == {"muon", "adamw", "sharded_adamw"}
    assert all(entry.ns_orthogonality_error is not None for entry in entries)
    compared = {frozenset(entry.compared_launches) for entry in entries}
    assert compared == {frozenset({Kernel.BLOCKED, Kernel.CUBLAS})}, "once, in the first step, and told in each"
    assert {len(set(entry.compared_launches.values())) for entry in entries} == {1}, "as many products by either"
    assert all(entry.memory_bytes > 1 << 20 for entry in entries)
    for own in by_rank:
        seconds = [0.0, *(entry.owner_compute_seconds or 0.0 for entry in own)]
        assert all(before < after for before, after in itertools.pairwise(seconds)), "each step adds its own"


def test_bfloat16_and_activation_checkpointing_train(tmp_path: Path) -> None:
    document = tiny_document(1, training={"steps": 8, "global_batch": 4, "precision": "bfloat16"})
    document["model"]["activation_checkpointing"] = True
    done = run(document, tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    losses = [entry.loss for entry in reports(done)]
    assert losses[-1] < losses[0] - 0.3


def test_a_rank_that_dies_ends_all() -> None:
    seen: list[Body] = []

    def kill_rank_one(body: Body) -> None:
        seen.append(body)
        if isinstance(body, RankReport) and body.rank == 1 and body.step == 2:
            next(child for child in multiprocessing.active_children() if child.name == "rank-1").kill()

    spec = tiny_spec(2, training={"steps": 100_000, "global_batch": 12})
    end = run_local(spec, kill_rank_one)
    assert end.reason == Reason.WORKER_LOST, end
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("rank-")]


def test_ranks_with_another_plan_than_the_job_do_not_start() -> None:
    seen: list[Body] = []
    end = run_local(tiny_spec(1), seen.append, plan_hash="0" * 64)
    assert end.reason == Reason.SETUP_FAILED and "was accepted with plan 000000000000" in end.message
    assert [body.name for body in seen if isinstance(body, Milestone)] == ["group_formed"]


def test_a_refused_spec_exits_with_two_and_says_all(tmp_path: Path) -> None:
    document = tiny_document(1, data={"files": ["/nonexistent"], "sequence_length": 8}, routing={})
    done = run(document, tmp_path)
    assert done.returncode == 2
    assert "/data/files/0" in done.stderr and "model.norm.weight" in done.stderr and "lm_head.weight" in done.stderr
