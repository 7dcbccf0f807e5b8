"""Targets with what was found beside them, and losses that should be the same."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks._verdicts import exposed_share, losses_apart, print_exposed, scaling_targets, step_targets


def row(contestant: str, step_ms: float, over: float | None, **more: Any) -> dict[str, Any]:
    return {
        "contestant": contestant, "step ms": step_ms, "over adamw": over, "update ms": 39.0, "peak GiB": 40.0,
        "exposed ms": None, "first losses": [10.0, 9.0],
        "counted": {
            "forward and backward exposed, share of the step": 0.021, "exposed, share of the step": {"publish": 0.02},
        } if contestant.startswith("ours") else {},
    } | more  # fmt: skip


def traced(passes: float, publish: float = 0.0) -> dict[str, float]:
    return {"passes": passes, "publish": publish} | dict.fromkeys(
        ("whole", "forward", "backward", "update", "communication"), 7.5
    )


def test_targets_of_a_step() -> None:
    rows = [
        row("fsdp2 + adamw Z3", 300.0, 1.0), row("ours pure Z3", 315.0, 1.05, **{"peak GiB": 41.0}),
        row("ours pure Z2", 330.0, None),
    ]  # fmt: skip
    verdicts = {(target.who, target.what): target.verdict for target in step_targets("llama", rows)}
    assert verdicts == {
        ("ours pure Z3", "step over AdamW's"): "met",
        ("ours pure Z3", "update ms"): "met",
        ("ours pure Z3", "peak memory over AdamW's"): "missed",
        ("ours pure Z3", "forward and backward exposed, share of the step, counted"): "missed",
        ("ours pure Z2", "step over AdamW's"): "not measured",
        ("ours pure Z2", "update ms"): "met",
        ("ours pure Z2", "peak memory over AdamW's"): "not measured",
        ("ours pure Z2", "forward and backward exposed, share of the step, counted"): "missed",
    }
    small = [row("ours pure Z3", 106.0, 1.06)]
    assert [target.verdict for target in step_targets("small-matrices", small)] == ["missed"], "1.05 there"
    assert not list(step_targets("llama-3.2-3b", rows))


def test_a_trace_is_believed_before_the_counters_and_adamws_is_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("fsdp2 + adamw Z3", 300.0, 1.0, **{"exposed ms": traced(9.0)}),
        row("ours pure Z3", 320.0, 1.05, **{"exposed ms": traced(3.2, publish=1.6)}),
        row("ours hybrid Z2", 320.0, 1.05),
    ]  # fmt: skip
    of = {target.who: target for target in step_targets("llama", rows) if target.limit == 0.02}
    pure, hybrid = of["ours pure Z3"], of["ours hybrid Z2"]
    assert pure.what.endswith(", traced") and (pure.found, pure.adamw) == (0.01, 0.03) and pure.verdict == "met"
    assert hybrid.what.endswith(", counted") and (hybrid.found, hybrid.adamw) == (0.021, None)
    assert exposed_share(rows[0] | {"exposed ms": None}, "passes") == (None, "counted"), "AdamW counts nothing"
    (publishing,) = [
        target
        for target in scaling_targets(
            "tiny", 4, [rows[1] | {"layout": "2x2", "mesh": (2, 2), "owner balance measured": 1}]
        )
        if "publishing" in target.what
    ]
    assert publishing.found == 0.005 and publishing.what.endswith("traced")
    print_exposed(rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines[0][3:] == ["Z3", *["7.500"] * 4, "9.000", "0.000", "7.500", "-", "-"]
    assert lines[1][3:] == [*["7.500"] * 4, "3.200", "1.600", "7.500", "6.720", "6.400"]
    assert lines[2][3:] == [*["-"] * 7, "6.720", "6.400"]


def test_targets_of_scaling() -> None:
    more = {"owner balance measured": 1.07}
    flat = row("ours pure Z3", 1.0, None, layout="1x8", mesh=(1, 8), **{"overhead %": 3.5}, **more)
    grid = flat | {"layout": "2x4", "mesh": (2, 4)}
    found = list(scaling_targets("llama-3.2-3b", 8, [flat, grid]))
    assert [(t.who, t.verdict) for t in found] == [
        ("1x8 ours pure Z3", "met"), ("1x8 ours pure Z3", "met"),
        ("2x4 ours pure Z3", "met"), ("2x4 ours pure Z3", "met"), ("2x4 ours pure Z3", "missed"),
    ]  # fmt: skip
    assert [t.verdict for t in scaling_targets("llama-3.1-8b", 8, [flat])] == ["missed", "met"], "3 % there"
    assert [t.what for t in scaling_targets("llama-3.2-3b", 4, [flat])] == ["owners, measured max over mean"]


def test_losses_that_should_be_the_same() -> None:
    base, pure, hybrid = row("fsdp2 + adamw Z3", 1, 1), row("ours pure Z3", 1, 1), row("ours hybrid Z2", 1, 1)
    other = row("fsdp2 + torch muon Z3", 1, 1, **{"first losses": [10.0, 8.0]})
    assert losses_apart([base, pure, hybrid, other], 1e-3) == [], "another optimizer goes its own way"
    (found,) = losses_apart([base, pure, hybrid | {"first losses": [10.0, 9.1]}], 1e-3)
    assert found.startswith("ours hybrid Z2: the first 2 steps differ from ours pure Z3's by 1.1")
    (found,) = losses_apart([base, other | {"first losses": [11.0, 8.0]}], 1e-3)
    assert found.startswith("fsdp2 + torch muon Z3: the first step differ")
    (found,) = losses_apart([base, row("ours pure Z2", 1, 1, **{"first losses": [10.0, float("nan")]})], 1e-3)
    assert "are no losses" in found
    aside = row("fsdp2 + adamw Z2", 1, 1, **{"first losses": [10.0, 9.5]})
    assert len(losses_apart([base, aside], 1e-3)) == 1, "Z2 and Z3 train the same"
