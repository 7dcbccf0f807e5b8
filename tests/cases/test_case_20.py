"""Case 20. Symptom elsewhere: a cast that returns its input lets the normalisation rescale momentum in place."""

from __future__ import annotations

import pytest
import torch

from tests.cases.common import Weights, dedicate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("nesterov", [False, True])
def test_newton_schulz_changes_neither_momentum_nor_gradient(
    one_rank: None, dtype: torch.dtype, nesterov: bool
) -> None:
    """A gradient of ones at rate 0. Our momentum is ``mu m + g``: 1 after the first step, 1.9 after the second."""
    model = Weights({"weight": (8, 5)}, torch.float32)
    options = {"lr": 0.0, "momentum": 0.9, "nesterov": nesterov, "ns_backend": "gram"}
    optimizer = dedicate(model, defaults={"optim_dtype": dtype}, **options)
    (piece,) = optimizer.pieces
    for expected in (1.0, 1.9):
        model({"weight": torch.ones(8, 5)}).backward()
        optimizer.step()
        assert torch.equal(piece.gradient, torch.ones(8, 5, dtype=dtype))
        momentum = optimizer.state[piece.parameter]["momentum_buffer"]
        assert momentum.dtype is dtype
        assert torch.allclose(momentum, torch.full((8, 5), expected, dtype=dtype))
        assert torch.equal(piece.master, torch.ones(8, 5))
        optimizer.zero_grad()
