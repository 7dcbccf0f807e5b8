"""Case 67. Symptom elsewhere: a matrix left out of Muon for its shape quietly trains at the small AdamW rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate
from tests.worker.saved import PlainState, resume, save
from worker.checkpoints.errors import CheckpointError


def test_the_table_shows_each_rate(one_rank: None) -> None:
    """One excluded matrix, one bias, one projection; a group gives the matrix the rate that it should have."""
    model = Weights({"projection": (8, 4), "excluded": (8, 1), "bias": (8,)})
    routes: list[dict[str, object]] = [{"name": ["excluded", "bias"], "set": {"route": "adamw"}}]
    optimizer = dedicate(model, routes, lr=0.02, adamw_lr=0.001)
    rates = _rates(model, optimizer)
    assert rates["projection"] == (0.02, pytest.approx(0.2 * 8**0.5))
    assert rates["excluded"] == rates["bias"] == (0.001, None)
    named = dict(model.named_parameters())
    groups = [
        {"params": [named["excluded"]], "name": "excluded", "adamw_lr": 0.01},
        {"params": [named["projection"], named["bias"]]},
    ]
    del optimizer
    again = dmuon.Muon(model, lr=0.02, adamw_lr=0.001, param_groups=groups)
    assert _rates(model, again)["excluded"] == (0.01, None)
    assert "0.01" in str(dmuon.summarize_param_groups(model, again))


def _rates(model: Weights, optimizer: dmuon.Muon) -> dict[str, tuple[object, object]]:
    rows = dmuon.summarize_param_groups(model, optimizer)["parameters"]
    return {row["name"]: (row["lr"], row["update_scale"]) for row in rows}  # type: ignore[attr-defined]


def test_changed_routes_follow_a_declared_policy(tmp_path: Path) -> None:
    """Refused unless the spec says what to do; then kept where the state means the same, and anew elsewhere."""
    save(tmp_path, 3)
    moved = PlainState(names={"matrix": "adamw", "bias": "sharded_adamw"})
    with pytest.raises(CheckpointError, match=r"checkpoint\.on_route_change"):
        resume(tmp_path, moved)
    assert torch.equal(moved.tensors["weight", "matrix"], torch.zeros(4, 3)), "nothing was touched"
    assert resume(tmp_path, moved, policy="keep") == 3
    assert torch.equal(moved.tensors["exp_avg", "bias"], torch.full((3,), 3.0))
    assert torch.equal(moved.tensors["exp_avg", "matrix"], torch.zeros(4, 3)), "Muon kept no moments"
