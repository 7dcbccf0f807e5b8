"""Case 42. Symptom elsewhere: the check is dropped in sharded mode, and clipping by infinity wipes good gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters
from tests.multiproc.harness import run_ranks

SHAPES = {"bad": (4, 4), "good": (4, 4), "table": (9, 4)}


def _clip() -> None:
    model = Weights(SHAPES)
    optimizer = dedicate(model, [{"name": "table", "set": {"route": "sharded_adamw"}}], non_finite="raise")
    gradients = {name: torch.full(shape, 5.0, dtype=torch.float64) for name, shape in SHAPES.items()}
    if dist.get_rank() == dist.get_world_size() - 1:
        gradients["bad"][0, 0] = float("inf")
    model(gradients).backward()
    before = masters(optimizer)
    assert not torch.isfinite(dmuon.clip_grad_norm_(optimizer, 1.0))
    for piece in optimizer.pieces:
        if piece.plan.name != "bad":
            assert torch.equal(piece.gradient, torch.full_like(piece.gradient, 5.0)), "no healthy gradient is touched"
    with pytest.raises(dmuon.NonFiniteGradient) as found:
        optimizer.step()
    assert found.value.names == ("bad",)
    assert all(torch.equal(value, before[name]) for name, value in masters(optimizer).items())


def test_an_infinite_norm_scales_nothing(one_rank: None) -> None:
    _clip()


def test_torchs_own_clipping_finds_nothing_to_clip_as_the_readme_says(one_rank: None) -> None:
    model = Weights({"weight": (4, 4)})
    optimizer = dedicate(model)
    model({"weight": torch.full((4, 4), 5.0, dtype=torch.float64)}).backward()
    assert model.get_parameter("weight").grad is None
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0.0
    assert dmuon.clip_grad_norm_(optimizer, 1.0) == pytest.approx(20.0), "where the gradient really is"


@pytest.mark.multiproc
def test_an_infinite_norm_scales_nothing_on_any_rank() -> None:
    """The infinity is in one weight of one rank; owners, shards and ranks without it all agree."""
    run_ranks(2, _clip)
