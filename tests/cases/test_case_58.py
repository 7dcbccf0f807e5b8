"""Case 58. Symptom elsewhere: fused updates refuse tensors of different meshes, deep inside the first step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dmuon_runtime as dmuon
from tests.cases.common import Weights, plan
from tests.multiproc.harness import run_ranks


def _spread(model: nn.Module, name: str, mesh: dist.DeviceMesh, placements: list[Shard | Replicate]) -> None:
    value = distribute_tensor(model.get_parameter(name).detach(), mesh, placements)
    model.register_parameter(name, nn.Parameter(value))


def _refuse() -> None:
    model = Weights({"plain": (4, 4), "line": (4, 4), "grid": (4, 4)})
    line = dist.DeviceMesh("cpu", torch.arange(4))
    grid = dist.DeviceMesh("cpu", torch.arange(4).view(2, 2))
    _spread(model, "line", line, [Shard(0)])
    _spread(model, "grid", grid, [Replicate(), Shard(1)])
    with pytest.raises(dmuon.UnsupportedFeature) as found:
        dmuon.dedicate_params(model, line, lambda name, p: True)
    assert [name.split()[0] for name in found.value.names] == ["line", "grid"], "each with its layout"
    assert "Shard(dim=0)" in str(found.value) and "Shard(dim=1)" in str(found.value)
    assert isinstance(model.get_parameter("line"), DTensor), "and nothing was changed"


@pytest.mark.multiproc
def test_layouts_are_refused_when_the_model_is_given() -> None:
    """One weight on a grid, one on a line, one plain."""
    run_ranks(4, _refuse)


def test_plain_weights_are_planned_as_ever() -> None:
    assert len(plan(Weights({"plain": (4, 4)})).parameters) == 1
