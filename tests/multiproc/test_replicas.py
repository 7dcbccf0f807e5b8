"""The laws with replicas (a grid of 2 by 2) and with replicated storage: equality, traffic, order, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, assert_traffic, hold_to_reference
from tests.multiproc.models import POLICY, make
from tests.multiproc.test_equality import plain_backward

pytestmark = pytest.mark.multiproc

FP32: dict[str, object] = {"overrides": POLICY["overrides"]}


def _weights(run: Run) -> dict[str, Tensor]:
    return dmuon.get_model_state_dict(run.model)


def _single(replicas: int, storage: str, **more: object) -> Run:
    setting = Setting(steps=3, policy=FP32, tolerance=1e-6, replicas=replicas, storage=storage, **more)  # type: ignore[arg-type]
    return hold_to_reference(plain_backward, setting, lambda: make(dtype=torch.float32))


def _equality(replicas: int, storage: str) -> None:
    """Equal to one process, exact traffic; synchronous publishing, Z2 and shared groups change no bit."""
    run = _single(replicas, storage)
    assert_traffic(run, 3)
    for more in ({"replicate_async": False}, {"reshard": False}, {"group_policy": "shared"}):
        other = _single(replicas, storage, **more)
        assert_traffic(other, 3)
        for name, value in _weights(run).items():
            assert torch.equal(value, _weights(other)[name]), f"{more} changes {name}"
    double = Setting(steps=3, max_norm=0.5, replicas=replicas, storage=storage)
    hold_to_reference(plain_backward, double)


@pytest.mark.parametrize(
    ("world_size", "replicas", "storage"), [(4, 2, "sharded"), (2, 2, "sharded"), (3, 1, "replicated")]
)
def test_weights_equal_one_process(world_size: int, replicas: int, storage: str) -> None:
    """A grid of 2 by 2, two replicas of one shard, and replicated storage on 3 ranks."""
    run_ranks(world_size, _equality, replicas, storage, deadline_s=100)
