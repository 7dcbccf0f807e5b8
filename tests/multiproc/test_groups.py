"""Process groups: made once for each set of ranks, used again by value, gone with the default group; grids checked."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon_runtime as dmuon
from dmuon_runtime.process_groups import num_idle_sets
from dmuon_runtime.runtime import find_runtime
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, dedicate, meshes
from tests.multiproc.models import POLICY, make
from tests.multiproc.test_equality import plain_backward

pytestmark = pytest.mark.multiproc


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _train_and_drop(setting: Setting, models: int) -> None:
    for index in range(models):
        run = dedicate(make(), setting)
        if index % 2 == 0:
            plain_backward(run.model, 0, dist.get_rank())
            run.optimizer.step()
        del run
        if index % 3 != dist.get_rank():  # ranks collect at different times
            gc.collect()
    gc.collect()


def _reuse(replicas: int, models: int) -> None:
    setting = Setting(replicas=replicas)
    mesh, replicate_mesh = meshes(replicas)
    _train_and_drop(setting, 4)
    before = _num_groups()
    for _ in range(models):
        dmuon.dedicate_params(nn.Linear(4, 4, bias=False), mesh, lambda *_: True, replicate_mesh=replicate_mesh)
        gc.collect(1)
    assert _num_groups() <= before + 5, "at most one set more, for a rank that collects late"
    first, second = dedicate(make(), setting), dedicate(make(), setting)
    controls = [find_runtime(run.model).transport._control for run in (first, second)]
    assert controls[0] is not controls[1], "two models that are alive do not share an order"


def test_groups_are_used_again() -> None:
    """Two hundred models, built and dropped, need no more groups than a few that are alive."""
    run_ranks(2, _reuse, 1, 200)
    run_ranks(4, _reuse, 2, 20)


def _new_default_group() -> None:
    setting = Setting()
    _train_and_drop(setting, 3)
    assert num_idle_sets() > 0
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder: list[str | None] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    dist.destroy_process_group()
    store = f"file://{Path(str(folder[0])) / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    assert num_idle_sets() == 0, "groups of a destroyed default group are not offered again"
    _train_and_drop(setting, 2)


def test_destroyed_groups_are_forgotten() -> None:
    """The default group is destroyed and made again between models."""
    run_ranks(2, _new_default_group)


def _uncollected() -> None:
    """A rank that holds its old model longer than the others gets new groups, and so do they."""
    run = dedicate(make(), Setting())
    kept = run if dist.get_rank() == 0 else None
    del run
    gc.collect()
    again = dedicate(make(), Setting())
    plain_backward(again.model, 0, dist.get_rank())
    again.optimizer.step()
    assert num_idle_sets() == (0 if kept is not None else 1)


def test_ranks_that_collect_at_different_times_agree() -> None:
    """Reuse is agreed on, so it cannot depend on one rank's garbage collector."""
    run_ranks(2, _uncollected)


def _grids() -> None:
    rank = dist.get_rank()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make()
    owners = dmuon.dedicate_params(
        model, grid["shard"], lambda *_: True, param_policy=POLICY, replicate_mesh=grid["replicate"]
    )
    plan = dmuon.get_plan(model)
    assert plan.hash == dmuon.plan_params(make(), (2, 2), lambda *_: True, param_policy=POLICY).hash
    for entry, parameter in zip(plan.parameters, model.parameters(), strict=False):
        assert owners[parameter] == ((-1, -1) if entry.owner is None else (entry.owner % 2, entry.owner // 2))
    assert {owner for owner in owners.values() if owner != (-1, -1)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    with pytest.raises(dmuon.MeshError, match=r'must have 1 axis, not 2.*mesh\["shard"\].*replicate_mesh'):
        dmuon.dedicate_params(make(), grid, lambda *_: True, param_policy=POLICY)
    with pytest.raises(dmuon.MeshError, match="the replicate mesh must have 1 axis"):
        dmuon.dedicate_params(make(), grid["shard"], lambda *_: True, param_policy=POLICY, replicate_mesh=grid)
    with pytest.raises(dmuon.MeshError, match="are no grid"):
        dmuon.dedicate_params(make(), grid["shard"], lambda *_: True, param_policy=POLICY, replicate_mesh=grid["shard"])
    with pytest.raises(dmuon.MeshError, match="one axis only"):
        dmuon.dedicate_params(
            make(), grid["shard"], lambda *_: True, param_policy=POLICY, replicate_mesh=grid["replicate"],
            storage="replicated",
        )  # fmt: skip
    other = torch.float32 if rank == 3 else torch.float64
    with pytest.raises(dmuon.PlanMismatch, match=r"ranks \[0, 1, 2\] have .* ranks \[3\] have"):
        dmuon.dedicate_params(
            make(dtype=other), grid["shard"], lambda *_: True, param_policy=POLICY, replicate_mesh=grid["replicate"]
        )


def test_grids_are_checked_on_every_rank() -> None:
    """Owners as (shard, replicate); wrong meshes, and plans that differ in one corner of the grid, are refused."""
    run_ranks(4, _grids)
