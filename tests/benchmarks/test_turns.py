"""Turns of the step benchmarks: what is timed, what is counted against which steps, who is in memory at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import _turns, contestants
from benchmarks._counting import Counted, counted_row
from benchmarks._turns import Runner, groups_of, num_at_once
from benchmarks.contestants import Contestant
from benchmarks.cost_model import plan_of
from benchmarks.workloads import WORKLOADS, Workload

CPU = torch.device("cpu")


class Noted(Workload):
    """Says when a batch is made."""

    done: list[str]

    def tokens(self, step: int, rank: int, device: torch.device) -> Tensor:
        self.done.append(f"batch {step}")
        return torch.zeros(1)


class NotedContestant(Contestant):
    """Trains nothing, and says when."""

    done: list[str]

    def forward_backward(self, tokens: Tensor) -> Tensor:
        self.done.append("train")
        return tokens

    def update(self) -> None:
        self.done.append("update")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order, where there are no other ranks."""
    done: list[str] = []
    Noted.done = NotedContestant.done = done
    monkeypatch.setattr(_turns.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(_turns.dist, "all_reduce", lambda *_: done.append("maximum"))
    monkeypatch.setattr(_turns.dist, "barrier", lambda: done.append("barrier"))
    return done


def runner() -> Runner:
    workload = Noted(1, 1, 1, 1, 1, 1, 1, 1)
    return Runner("one", NotedContestant(torch.nn.Identity(), []), workload, CPU)


def test_ranks_begin_a_turn_together_with_everything_at_hand(alone: list[str]) -> None:
    runner().take_turn(2)
    assert alone == [*("batch 0", "batch 1", "batch 2", "barrier"), *["train", "update"] * 3, "maximum"]


def test_the_first_step_of_a_turn_is_not_timed_and_the_others_have_no_gap(
    alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = iter([100.0, 150.0, 153.0, 160.0, 164.0, 171.0])
    monkeypatch.setattr(_turns, "_mark", lambda _: next(marks))
    one = runner()
    one.take_turn(2)
    assert one.step_ms == [10.0, 11.0] and one.update_ms == [7.0, 7.0]


def test_memory_is_a_contestants_own(alone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"now": 100, "most": 0}  # others hold 60 of it

    class Growing(NotedContestant):
        def forward_backward(self, tokens: Tensor) -> Tensor:
            gpu["most"] = max(gpu["most"], gpu["now"] + 30)
            gpu["now"] += 1  # something stays after each step
            return tokens

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: gpu["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gpu["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: gpu.update(most=gpu["now"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(_turns, "_mark", lambda _: 0.0)
    monkeypatch.setattr(Runner, "_keep_times", lambda *_: None)
    one = Runner("one", Growing(torch.nn.Identity(), []), runner().workload, torch.device("cuda", 0), resident_bytes=40)
    one.take_turn(1)
    assert (one.peak_bytes, one.resident_bytes) == (40 + 1 + 30, 42)
    gpu["now"] += 500  # the others grow
    one.take_turn(1)
    assert (one.peak_bytes, one.resident_bytes) == (42 + 1 + 30, 44)


def test_who_is_compared_is_in_every_group() -> None:
    assert groups_of(["adamw", "a", "b", "c"], None) == [["adamw", "a", "b", "c"]]
    assert groups_of(["adamw", "a", "b", "c"], 2) == [["adamw", "a"], ["adamw", "b"], ["adamw", "c"]]
    assert groups_of(["adamw", "a", "b", "c"], 3) == [["adamw", "a", "b"], ["adamw", "c"]]
    assert groups_of(["adamw", "a"], 3) == [["adamw", "a"]] and groups_of([], None) == []


def test_as_many_at_once_as_an_h200_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = SimpleNamespace(total_memory=143_771 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    gpu, large = torch.device("cuda", 0), WORKLOADS["llama-3.2-3b"]
    assert [num_at_once(large, parts, gpu) for parts in (1, 2)] == [2, 4]
    assert num_at_once(WORKLOADS["llama"], 1, gpu) == 6 and num_at_once(large, 1, CPU) is None
    assert num_at_once(WORKLOADS["llama-3.1-8b"], 4, gpu) == 3


def test_what_was_counted_is_of_all_ranks_and_a_step() -> None:
    plan = plan_of(WORKLOADS["tiny"], (2, 1))
    keys = ("muon", "forward"), ("muon", "reduce"), ("muon", "publish")
    quick = Counted(dict.fromkeys(keys, (0.4, 0.1, 80)), owner_s=0.8, matrices=56, ns_s=0.4)
    slow = Counted(dict.fromkeys(keys, (0.4, 0.3, 80)), owner_s=1.6, matrices=56, ns_s=0.8)
    row: dict[str, Any] = counted_row(plan, [quick, slow], rounds=2, steps=3, step_ms=100.0)  # 8 steps, 6 of them timed
    assert row["owner ms"] == pytest.approx([100.0, 200.0]) and row["owner compute ms"] == pytest.approx(200.0)
    assert row["owner balance measured"] == pytest.approx(200 / 150) and row["newton-schulz ms"] == pytest.approx(100.0)
    assert row["matrices"] == [7, 7] == row["planned matrices"]
    forward, publish = (row["communication"][f"muon/{phase}"] for phase in ("forward", "publish"))
    assert forward["ms"] == pytest.approx(50.0) and forward["exposed ms"] == pytest.approx(300 / 8)
    assert forward["overlap"] == pytest.approx(0.5) and forward["bytes"] == 20
    assert publish["ms"] == pytest.approx(50.0) and publish["exposed ms"] == pytest.approx(300 / 6), (
        "first steps wait not"
    )
    assert row["exposed, share of the step"]["publish"] == pytest.approx(0.5)
    assert row["forward and backward exposed, share of the step"] == pytest.approx(0.75), (
        "reductions are of the backward"
    )


def test_the_public_package_gets_the_same_dtypes_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, dict[str, object]] = {}
    public = SimpleNamespace(
        dedicate_params=lambda model, mesh, predicate, **options: calls.update(dedicate=options | {"mesh": mesh}),
        Muon=lambda model, lr, **options: calls.update(muon=options | {"lr": lr}) or "an optimizer",
    )
    monkeypatch.setattr(contestants, "import_module", lambda name: {"dmuon": public}[name])
    monkeypatch.setattr(contestants, "_shard", lambda _, mesh, *rest: calls.update(shard={"mesh": mesh, "rest": rest}))

    class Grid(dict[str, str]):
        def size(self, _: int) -> int:
            return 2

    grid: Any = Grid(shard="shards", replicate="replicas")
    built = contestants.public_dmuon(torch.nn.Identity(), grid, False, torch.bfloat16)
    assert built.optimizers == ["an optimizer"] and not built.counted
    assert calls["dedicate"] == {
        "mesh": "shards", "replicate_mesh": "replicas", "reshard_after_forward": False,
        "param_policy": {"defaults": {"param_dtype": torch.bfloat16, "grad_dtype": torch.float32}},
    }  # fmt: skip
    assert calls["shard"] == {"mesh": grid, "rest": (False, torch.bfloat16, set())}
    assert calls["muon"] == {"lr": 0.01, "weight_decay": 0.01, "adamw_lr": 3e-4, "adamw_weight_decay": 0.01}
