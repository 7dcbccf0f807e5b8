"""Case 40. Symptom elsewhere: ranks without work orthogonalise zero padding, get NaN and crash the communicator."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dmuon_runtime as dmuon
from dmuon_runtime import ledger
from tests.cases.common import Weights, dedicate, train
from tests.multiproc.harness import run_ranks

pytestmark = pytest.mark.multiproc


def _train() -> tuple[int, int, bool]:
    model = Weights({"weight": (8, 8)}, torch.float32)
    optimizer = dedicate(model, ns_backend="gram")
    before = sum(count.matrices for count in ledger.snapshot().values())
    for step in range(2):
        train(model, optimizer, {"weight": torch.randn(8, 8, generator=torch.Generator().manual_seed(step))})
    ran = sum(count.matrices for count in ledger.snapshot().values()) - before
    finite = bool(torch.isfinite(dmuon.get_model_state_dict(model)["weight"]).all())
    return ran, dmuon.get_plan(model).ranks[dist.get_rank()].matrices, finite


def test_idle_ranks_run_no_newton_schulz() -> None:
    """One weight of 8 by 8 on four ranks, two steps."""
    found = run_ranks(4, _train)
    assert sorted(ran for ran, _, _ in found) == [0, 0, 0, 2]
    assert all(ran == 2 * planned and finite for ran, planned, finite in found)
