"""Case 3. Symptom elsewhere: one NaN is folded into momentum before the check drops the step; nothing ever moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters, train
from tests.multiproc.harness import run_ranks

SHAPES = {"bad": (8, 8), "good": (8, 8), "bias": (8,)}
ROUTES: list[dict[str, object]] = [{"name": "bias", "set": {"route": "adamw"}}]


def _gradients(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in SHAPES.items()}


def _one_bad_step(value: float, bad_rank: int) -> None:
    model, clean = Weights(SHAPES), Weights(SHAPES)
    optimizer, other = dedicate(model, ROUTES), dedicate(clean, ROUTES)
    before = masters(optimizer)
    poisoned = _gradients(1)
    if dist.get_rank() == bad_rank:
        poisoned["bad"][3, 4] = value
    train(model, optimizer, poisoned)
    assert optimizer.last_step is not None
    assert optimizer.last_step.skipped and optimizer.last_step.offenders == ("bad",)
    assert all(torch.equal(value, before[name]) for name, value in masters(optimizer).items())
    assert all(not bool(tensor.any()) for state in optimizer.state.values() for tensor in state.values())
    train(model, optimizer, _gradients(2))
    train(clean, other, _gradients(2))
    expected = masters(other)
    assert all(torch.equal(value, expected[name]) for name, value in masters(optimizer).items())
    optimizer.non_finite = "raise"
    model(poisoned).backward()
    kept = masters(optimizer)
    with pytest.raises(dmuon.NonFiniteGradient, match="bad"):
        optimizer.step()
    assert all(torch.equal(value, kept[name]) for name, value in masters(optimizer).items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_step_leaves_no_trace(one_rank: None, value: float, caplog: pytest.LogCaptureFixture) -> None:
    """The step after it equals a run that never saw it; no weight, momentum or count has moved, and the log says so."""
    _one_bad_step(value, 0)
    said = [record.getMessage() for record in caplog.records]
    assert said == 2 * ["nothing was updated: infinite or NaN gradient of bad"], "once for each step, not for each read"


@pytest.mark.multiproc
def test_a_bad_rank_stops_the_step_on_all() -> None:
    """The NaN is on rank 1 only; both ranks skip, name it, and go on alike."""
    run_ranks(2, _one_bad_step, float("nan"), 1)
