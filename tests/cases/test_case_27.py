"""Case 27. Symptom elsewhere: Newton-Schulz runs and momentum advances once for each micro-batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dmuon_runtime as dmuon
from dmuon_runtime import ledger
from tests.cases.common import dedicate
from tests.multiproc.harness import run_ranks

STEPS = 3


def _train(num_micro: int) -> tuple[dict[str, Tensor], int]:
    """Train on 8 samples a rank in ``num_micro`` parts; return all weights and how many matrices ran."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
    optimizer = dedicate(model, ns_backend="gram")
    before = sum(count.matrices for count in ledger.snapshot().values())
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        parts = x.chunk(num_micro)
        with dmuon.no_sync(model):
            for part in parts[:-1]:
                (F.mse_loss(model(part), part[:, :4]) / num_micro).backward()
        (F.mse_loss(model(parts[-1]), parts[-1][:, :4]) / num_micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dmuon.get_model_state_dict(model), sum(count.matrices for count in ledger.snapshot().values()) - before


def _laws() -> None:
    whole, matrices = _train(1)
    parts, again = _train(4)
    assert all(torch.allclose(parts[name], value, rtol=1e-9, atol=1e-12) for name, value in whole.items())
    assert matrices == again
    counts: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, matrices)
    assert sum(count or 0 for count in counts) == 2 * STEPS, "matrices times optimizer steps, over all ranks"


def test_parts_of_a_batch_are_one_step(one_rank: None) -> None:
    _laws()


@pytest.mark.multiproc
def test_parts_of_a_batch_are_one_step_on_two_ranks() -> None:
    """Eight samples as 1 of 8 and as 4 of 2; gradients travel with the last part only."""
    run_ranks(2, _laws)
