"""Case 21. Symptom elsewhere: a rank without a gradient issues other collectives than the rest, and all hang."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cases.common import Weights
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, hold_to_reference

pytestmark = pytest.mark.multiproc

POLICY: dict[str, object] = {"defaults": {"master_dtype": "fp64", "optim_dtype": "fp64"}}


def _backward(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    names = ("first", "second") if rank == 0 else ("first",)
    model({name: torch.randn(6, 4, generator=generator, dtype=torch.float64) for name in names}).backward()


def _train() -> None:
    hold_to_reference(_backward, Setting(policy=POLICY), lambda: Weights({"first": (6, 4), "second": (6, 4)}))


def test_a_missing_gradient_counts_as_zeros() -> None:
    """Rank 0 uses both weights, rank 1 the first only: equal to one process, within 20 s."""
    run_ranks(2, _train, deadline_s=20)
