"""Case 24. Symptom elsewhere: a zero gradient (zero-initialised outputs) becomes 0/0 and the loss NaN."""

from __future__ import annotations

import torch

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters, train


def test_a_zero_gradient_decays_and_nothing_else(one_rank: None) -> None:
    model = Weights({"weight": (16, 32)}, torch.float32)
    optimizer = dedicate(model, lr=0.1, weight_decay=0.1, ns_backend="gram")
    train(model, optimizer, {"weight": torch.zeros(16, 32)})
    assert torch.equal(masters(optimizer)["weight"], torch.full((16, 32), 1.0 - 0.1 * 0.1))
    assert not optimizer.state[model.get_parameter("weight")]["momentum_buffer"].any()
    assert optimizer.last_step is not None
    assert optimizer.last_step.updates["muon"] == (0.0, 16 * 32)
    assert float(dmuon.orthogonality_error(torch.zeros(16, 32))) == 0.0


def test_a_block_of_zero_rows_stays_finite_and_still(one_rank: None) -> None:
    model = Weights({"weight": (16, 32)}, torch.float32)
    optimizer = dedicate(model, lr=0.1, ns_backend="gram")
    gradient = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    gradient[4:8] = 0
    train(model, optimizer, {"weight": gradient})
    change = masters(optimizer)["weight"] - 1
    assert bool(torch.isfinite(change).all())
    assert change[4:8].abs().max() < 1e-6 < change[:4].abs().max()
