"""Case 1. Symptom elsewhere: fewer rows than ranks leave empty shards, buffers differ in size and the step hangs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cases.common import Weights
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, hold_to_reference

pytestmark = pytest.mark.multiproc

COLUMNS = 16
ROWS = (5, 1, 2, 3, 15)
SHAPES = {f"{route}_{rows}_{i}": (rows, COLUMNS) for route in ("own", "shard") for rows in ROWS for i in range(8)}
POLICY: dict[str, object] = {
    "defaults": {"master_dtype": "fp64", "optim_dtype": "fp64"},
    "overrides": [{"name": "own_1_", "set": {"route": "adamw"}}, {"name": "shard", "set": {"route": "sharded_adamw"}}],
}


def _backward(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model({name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in SHAPES.items()}).backward()


def _train() -> None:
    hold_to_reference(_backward, Setting(steps=2, policy=POLICY), lambda: Weights(SHAPES))


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_rows_on_any_number_of_ranks(world_size: int) -> None:
    """Eight weights of each of 5, 1, 2, 3 and 15 rows, owned and sharded: equal to one process, one order for all."""
    run_ranks(world_size, _train)
