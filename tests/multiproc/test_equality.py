"""Weights after k steps equal those of one process that averages the same gradients, and traffic equals the plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, assert_traffic, hold_to_reference
from tests.multiproc.models import POLICY, batch, lm_loss, make

pytestmark = pytest.mark.multiproc

FP32: dict[str, object] = {"overrides": POLICY["overrides"]}
STEPS = 3


def plain_backward(model: nn.Module, step: int, rank: int) -> None:
    """One forward and backward."""
    lm_loss(model, batch(step, rank)).backward()


def _state(run: Run) -> dict[str, Tensor]:
    return dmuon.get_model_state_dict(run.model)


def _equal_in_every_mode() -> None:
    single = Setting(steps=STEPS, policy=FP32, tolerance=1e-6)
    z3 = hold_to_reference(plain_backward, single, lambda: make(dtype=torch.float32))
    assert_traffic(z3, STEPS)
    z2 = hold_to_reference(
        plain_backward,
        Setting(steps=STEPS, policy=FP32, tolerance=1e-6, reshard=False),
        lambda: make(dtype=torch.float32),
    )
    assert_traffic(z2, STEPS)
    for name, value in _state(z3).items():
        assert torch.equal(value, _state(z2)[name]), f"Z2 and Z3 differ in {name}"
    double = hold_to_reference(plain_backward, Setting(steps=STEPS, max_norm=0.5))
    assert double.optimizer.last_step is not None
    assert not double.optimizer.last_step.skipped
    hold_to_reference(plain_backward, Setting(steps=2, group_policy="shared"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_equal_one_process(world_size: int) -> None:
    """Parameters of 13 by 12, 20 and 1 elements leave uneven and empty shards on 3 and 4 ranks."""
    run_ranks(world_size, _equal_in_every_mode)
