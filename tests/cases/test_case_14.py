"""Case 14. Symptom elsewhere: a stack of experts is flattened into one tall matrix and three of four stop learning."""

from __future__ import annotations

import pytest
import torch

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters, plan, train

SHAPE = (4, 16, 8)


def test_each_expert_is_a_matrix_of_its_own(one_rank: None) -> None:
    """One expert's gradient is 100 times larger: update norms are equal within a tenth, scaled as 16 by 8."""
    model = Weights({"experts": SHAPE})
    optimizer = dedicate(model, [{"set": {"matrix_view": "experts"}}], ns_backend="gram", lr=1.0)
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradient[0] *= 100
    before = masters(optimizer)["experts"]
    train(model, optimizer, {"experts": gradient})
    norms = torch.linalg.matrix_norm(masters(optimizer)["experts"] - before)
    assert float(norms.max() / norms.min()) < 1.1
    assert float(norms.mean()) == pytest.approx(0.2 * 16**0.5 * 8**0.5, rel=0.1), "0.2 sqrt(16), and 8 directions"
    assert dmuon.get_plan(model).num_matrices == 4


def test_a_reading_must_be_stated() -> None:
    with pytest.raises(dmuon.RouteRefused, match='"matrix_view": "experts"'):
        plan(Weights({"experts": SHAPE}))
    assert plan(Weights({"experts": SHAPE}), [{"set": {"matrix_view": "flatten"}}]).num_matrices == 1
