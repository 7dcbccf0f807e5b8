"""Case 30. Symptom elsewhere: momentum comes back in another dtype, and the first step after it raises or drifts."""

from __future__ import annotations

import itertools

import pytest
import torch

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters, train

DTYPES = ("float32", "bfloat16", "float16")
SHAPES = {"uneven": (63, 63), "bias": (63,)}


@pytest.mark.parametrize(("param", "optim"), list(itertools.product(DTYPES, DTYPES)))
def test_a_resume_in_the_middle_changes_no_bit(one_rank: None, param: str, optim: str) -> None:
    """Every dtype of parameter and momentum, and of gradients; uneven sizes; two steps before and two after."""
    for grad in DTYPES:
        policy = {"param_dtype": param, "grad_dtype": grad, "optim_dtype": optim}
        bias = [{"name": "bias", "set": {"route": "adamw"}}]
        gradients = [
            {name: torch.randn(shape, generator=torch.Generator().manual_seed(step)) for name, shape in SHAPES.items()}
            for step in range(4)
        ]
        model = Weights(SHAPES, torch.float32)
        optimizer = dedicate(model, bias, policy)
        for step in range(2):
            train(model, optimizer, gradients[step])
        state = dmuon.get_optimizer_state_dict(model, optimizer)
        assert str(state["state"]["uneven"]["momentum_buffer"].dtype) == f"torch.{optim}"
        assert state["state"]["bias"]["step"].dtype is torch.float32
        other = Weights(SHAPES, torch.float32)
        resumed = dedicate(other, bias, policy)
        dmuon.set_model_state_dict(other, dmuon.get_model_state_dict(model))
        dmuon.set_optimizer_state_dict(other, resumed, state)
        for step in (2, 3):
            train(model, optimizer, gradients[step])
            train(other, resumed, gradients[step])
        assert all(torch.equal(value, masters(resumed)[name]) for name, value in masters(optimizer).items())
