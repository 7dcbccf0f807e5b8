"""Case 37. Symptom elsewhere: a fused query, key and value is orthogonalised as one matrix, or cut by a shard."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, plan, train
from tests.multiproc.harness import run_ranks

ROWS = {"q": 8, "k": 2, "v": 2}
STORED_BOTH_WAYS = {"fused": (12, 8), "turned": (8, 12)}
OVERRIDES: list[dict[str, object]] = [
    {"name": ["fused", "turned"], "set": {"split_rows": list(ROWS.values())}},
    {"name": "turned", "set": {"matrix_view": "transposed"}},
]


def _train(scale: str) -> None:
    model = Weights({**STORED_BOTH_WAYS, **{name: (rows, 8) for name, rows in ROWS.items()}})
    optimizer = dedicate(model, OVERRIDES, {"master_dtype": "fp64", "optim_dtype": "fp64"}, scale=scale)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        fused = torch.randn(12, 8, generator=generator, dtype=torch.float64)
        parts = dict(zip(ROWS, fused.split(list(ROWS.values())), strict=True))
        train(model, optimizer, {"fused": fused, "turned": fused.T.contiguous(), **parts})
    state = dmuon.get_model_state_dict(model)
    separate = torch.cat([state[name] for name in ROWS])
    assert torch.equal(state["fused"], separate)
    assert torch.allclose(state["turned"].T, separate, rtol=1e-12), "another layout in memory may round otherwise"
    assert dmuon.get_plan(model).num_matrices == 9


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_blocks_are_weights_of_their_own(one_rank: None, scale: str) -> None:
    """Eight, two and two rows of width 8, stored [outputs, inputs] and [inputs, outputs]: exactly three weights."""
    _train(scale)


@pytest.mark.multiproc
@pytest.mark.parametrize("world_size", [2, 3])
def test_blocks_are_weights_of_their_own_at_any_world_size(world_size: int) -> None:
    run_ranks(world_size, _train, "match_rms_adamw")


def test_rows_that_do_not_add_up_are_refused_with_both_numbers() -> None:
    with pytest.raises(dmuon.RouteRefused, match=r"adds up to 13, but it has 12 rows"):
        plan(Weights(STORED_BOTH_WAYS), [{"set": {"split_rows": [8, 3, 2]}}])
