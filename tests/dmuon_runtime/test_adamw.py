"""AdamW equals torch's, step by step and with different step counts; a closed gate leaves every bit alone."""

from __future__ import annotations

import math

import pytest
import torch

from dmuon_runtime.adamw import AdamWSettings, AdamWTensors, adamw_update
from dmuon_runtime.matrix_updates import update_scale

SETTINGS = AdamWSettings(lr=3e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def _tensors(weights: list[torch.Tensor]) -> AdamWTensors:
    return AdamWTensors(
        weights,
        [torch.zeros_like(w) for w in weights],
        [torch.zeros_like(w) for w in weights],
        [torch.zeros_like(w) for w in weights],
        [torch.zeros(()) for _ in weights],
    )


def test_equals_torch() -> None:
    torch.manual_seed(0)
    mine = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    theirs = [torch.nn.Parameter(w.clone()) for w in mine]
    optimizer = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    tensors = _tensors(mine)
    for step in range(6):
        present = [0, 1] if step % 2 else [1]  # the first weight has no gradient in even steps
        for index, parameter in enumerate(theirs):
            parameter.grad = torch.randn_like(parameter) if index in present else None
        chosen = AdamWTensors(
            [mine[i] for i in present],
            [g for p in theirs if (g := p.grad) is not None],
            [tensors.exp_avgs[i] for i in present],
            [tensors.exp_avg_sqs[i] for i in present],
            [tensors.steps[i] for i in present],
        )
        adamw_update(chosen, SETTINGS, gate=None if step < 3 else torch.ones(()))
        optimizer.step()
        for weight, parameter in zip(mine, theirs, strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_before", [0, 2])
def test_closed_gate_changes_nothing(num_before: int) -> None:
    weights = [torch.randn(4)]
    tensors = _tensors(weights)
    for _ in range(num_before):
        tensors.gradients[0].copy_(torch.randn(4))
        adamw_update(tensors, SETTINGS, None)
    parts = (tensors.weights, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.steps)
    before = [part[0].clone() for part in parts]
    tensors.gradients[0].fill_(math.nan)
    squares = adamw_update(tensors, SETTINGS, torch.zeros(()))
    assert all(torch.equal(part[0], old) for part, old in zip(parts, before, strict=True))
    assert squares[0].sum() == 0


def test_scale_rules() -> None:
    assert update_scale("match_rms_adamw", 100, 25) == pytest.approx(2.0)
    assert update_scale("original", 100, 25) == 2.0
    assert update_scale("original", 25, 100) == 1.0
    assert update_scale("none", 100, 25) == 1.0
