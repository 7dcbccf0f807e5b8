"""The plain baselines under FSDP2, on a grid and under DDP: one process's weights, whatever the shards look like."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import dmuon_runtime as dmuon
from dmuon_runtime.baselines import BaselineConfig, Tandem
from dmuon_runtime.guests import local_part
from tests.multiproc.checkpointed import make_exchange
from tests.multiproc.harness import run_ranks
from tests.worker.specs import tiny_spec
from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.exchange import Exchange
from worker.optimizers import BaselineDriver, baseline_driver, shard_units

pytestmark = pytest.mark.multiproc

ROWS = (2, 3, 2, 5, 1, 8)
"""Case 1. Over four ranks: two empty ones, one empty, two, an uneven one, three, even: where torch's own Muon fails."""
CONFIG = BaselineConfig(optimizer="muon", muon_weight_decay=0.1, weight_decay_exclude_1d=True)
BAD_STEP, LONELY_STEP, STEPS = 1, 2, 4


class Fans(nn.Module):
    """Linear maps of a few outputs each, beside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.fans = nn.ModuleList(nn.Linear(6, rows) for rows in ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 1]."""
        return torch.cat([fan(x) for fan in self.fans], dim=1).square().mean(dim=1, keepdim=True)


def make() -> Fans:
    torch.manual_seed(0)
    return Fans().double()


def backward(model: nn.Module, step: int, rank: int) -> None:
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    (model(x).mean()).backward()


def drive(model: nn.Module, one_step: Callable[[nn.Module, int], None]) -> tuple[Tandem, list[float]]:
    """Train, with a step that is skipped; return the norms of the others."""
    driver, norms = Tandem(model, dmuon.build_optimizers(model, CONFIG)), []
    for step in range(STEPS):
        one_step(model, step)
        norm = float(driver.clip(0.05))
        driver.step()
        assert driver.last_step is not None and driver.last_step.skipped == (step == BAD_STEP)
        driver.zero_grad()
        if math.isfinite(norm):
            norms.append(norm)
    return driver, norms


def on_this_rank(model: nn.Module, step: int) -> None:
    """A NaN in the part of one rank; a gradient that one rank alone lacks, when they are sharded."""
    backward(model, step, dist.get_rank())
    fan = dict(model.named_modules())[f"{'module.' * isinstance(model, DistributedDataParallel)}fans.5"]
    assert isinstance(fan, nn.Linear) and fan.weight.grad is not None
    if step == BAD_STEP and (dist.get_rank() == 1 or not isinstance(fan.weight, DTensor)):
        local_part(fan.weight.grad)[0, 0] = math.nan
    if step == LONELY_STEP and isinstance(fan.weight, DTensor) and fan.weight.device_mesh.get_local_rank(-1) == 1:
        fan.weight.grad = None


def reference(num_shards: int) -> tuple[Fans, list[float]]:
    def mean(model: nn.Module, step: int) -> None:
        for rank in range(dist.get_world_size()):
            backward(model, step, rank)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
        grad = model.get_parameter("fans.5.weight").grad
        assert grad is not None
        if step == BAD_STEP:
            grad[2, 0] = math.nan
        if step == LONELY_STEP and num_shards > 1:
            grad[8 // num_shards : 2 * (8 // num_shards)] = 0  # the rows of the rank that had none

    model = make()
    return model, drive(model, mean)[1]


def hold(model: nn.Module, norms: list[float], num_shards: int) -> None:
    expected, expected_norms = reference(num_shards)
    assert norms == pytest.approx(expected_norms, rel=1e-9)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    for name, value in expected.named_parameters():
        found = inner.get_parameter(name).detach()
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        # bfloat16 in Newton-Schulz: a last bit of its input can move a last bit of its output
        torch.testing.assert_close(whole, value.detach(), rtol=1e-5, atol=1e-4 if value.ndim == 2 else 1e-9)


def shard(model: nn.Module, *shape: int) -> nn.Module:
    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model


class Output(NamedTuple):
    logits: Tensor


class Words(nn.Module):
    """What the loop takes a transformers model for, with numbered layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.lm_head = nn.Linear(6, 7, bias=False)

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return Output(self.lm_head(x))


def driver_of(precision: str = "float32", **mesh: int) -> BaselineDriver:
    torch.manual_seed(0)
    training = {"steps": 1, "global_batch": 12, "precision": precision}
    spec = tiny_spec(mesh=mesh, training=training, optimizer={"kind": "muon"})
    model, device = Words(), torch.device("cpu")
    assert shard_units(spec, model) == ["layers.0", "layers.1"]
    shape = (spec.mesh.replicate, spec.mesh.shard)
    alone = init_device_mesh("cpu", shape if mesh else (1, 4), mesh_dim_names=("replicate", "shard"))
    return baseline_driver(spec, model, alone, device)


def learn(driver: BaselineDriver, ranks: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps of two micro batches a rank, the first without communication; norms and whole weights."""
    norms = []
    for step in range(2):
        for rank in ranks:
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
                tokens = torch.randint(0, 7, (3, 5), generator=generator)
                with driver.no_sync() if micro == 0 else nullcontext():
                    loss = nn.functional.cross_entropy(driver.forward(tokens).float().flatten(0, 1), tokens.flatten())
                    (loss / 2 / len(ranks)).backward()
        norms.append(float(driver.clip(0.1)))
        driver.optimizer.step()
        driver.optimizer.zero_grad()
    assert driver.counters() is None and driver.rates() == {"muon": 0.02, "adamw": 1e-3}
    return norms, driver.whole_state()


def exchange(topic: str) -> Exchange:
    return make_exchange(topic, dist.get_rank(), dist.get_world_size())


def _whole(driver: BaselineDriver) -> dict[tuple[str, str], Tensor]:
    """Put the sources of all ranks together, which must hold every element exactly once."""
    state = driver.checkpointed(exchange("whole"))
    mine = [(part.kind, part.name, part.start, part.values().clone()) for part in state.parts() if part.is_source]
    everyone: list[list[tuple[str, str, int, Tensor]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    found: dict[tuple[str, str], Tensor] = {}
    for entry in state.layout():
        whole = torch.full((max(1, math.prod(entry.shape)),), math.nan, dtype=entry.dtype)
        key = (entry.kind, entry.names[0])
        for start, values in [(start, v) for each in everyone for kind, n, start, v in each if (kind, n) == key]:
            assert bool(whole[start : start + values.numel()].isnan().all()), "no element twice"
            whole[start : start + values.numel()] = values
        assert not bool(whole.isnan().any()), f"{entry} is incomplete"
        found[key] = whole
    return found


def _any_mesh_continues(saved: BaselineDriver) -> None:
    """What FSDP2 saved, a grid, replicas and FSDP2 again continue to the same bits; a failed read changes nothing."""
    whole = _whole(saved)
    routes = saved.checkpointed(exchange("routes")).routes()
    assert routes["layers.0.weight"] == "muon" and routes["lm_head.weight"] == "adamw"
    assert {kind for kind, _ in whole} == {"weight", "momentum_average", "step", "exp_avg", "exp_avg_sq"}
    for mesh in ({"shard": 4}, {"replicate": 2, "shard": 2}, {"replicate": 4}):
        other = driver_of(**mesh)
        before = _whole(other)
        with pytest.raises(CheckpointError, match="rank 1: OSError"):
            other.checkpointed(exchange(f"bad {mesh}")).load(lambda part: _read(whole, part, fail=dist.get_rank() == 1))
        assert all(torch.equal(value, before[key]) for key, value in _whole(other).items())
        other.checkpointed(exchange(f"good {mesh}")).load(lambda part: _read(whole, part))
        assert all(torch.equal(value, whole[key]) for key, value in _whole(other).items())
        learn(other, [dist.get_rank()])
        if mesh == {"shard": 4}:
            learn(saved, [dist.get_rank()])
            expected = _whole(saved)
            assert all(torch.equal(value, expected[key]) for key, value in _whole(other).items())


def _read(whole: dict[tuple[str, str], Tensor], part: dmuon.StatePart, fail: bool = False) -> Tensor:
    if fail:
        raise OSError("no such file")
    return whole[part.kind, part.name][part.start : part.stop]


def _drivers() -> None:
    everyone = list(range(4))
    norms, expected = learn(driver_of(), everyone)
    for mesh, precision in (
        ({"shard": 4}, "float32"), ({"replicate": 2, "shard": 2}, "float32"), ({"replicate": 4}, "float32"),
        ({"shard": 4}, "bfloat16"), ({"replicate": 4}, "bfloat16"),
    ):  # fmt: skip
        found_norms, found = learn(driver_of(precision, **mesh), [dist.get_rank()])
        half = precision == "bfloat16"
        assert found_norms == pytest.approx(norms, rel=2e-2 if half else 1e-5) and (found_norms != norms) >= half
        if dist.get_rank() == 0:
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name].dtype == torch.float32, "masters stay"
                if not half:
                    torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-4)
    saved = driver_of(shard=4)
    learn(saved, [dist.get_rank()])
    _any_mesh_continues(saved)


def _every_kind() -> dict[str, int]:
    sharded, grid = shard(make(), 4), shard(make(), 2, 2)
    assert local_part(sharded.get_parameter("fans.0.weight")).numel() == (6 if dist.get_rank() < 2 else 0)
    driver, norms = drive(sharded, on_this_rank)
    hold(sharded, norms, 4)
    saved = driver.state_by_name()
    other = shard(make(), 4)
    other.load_state_dict(copy.deepcopy(sharded.state_dict()))
    resumed = Tandem(other, dmuon.build_optimizers(other, CONFIG))
    resumed.load_state_by_name(copy.deepcopy(saved))
    for each, model in ((driver, sharded), (resumed, other)):
        backward(model, 9, dist.get_rank())
        with CommDebugMode() as calls:
            each.step()
    for mine, theirs in zip(sharded.parameters(), other.parameters(), strict=True):
        assert torch.equal(local_part(mine), local_part(theirs))
    whole = driver.state_by_name(whole=True)
    if dist.get_rank() == 0:
        assert whole["state"]["fans.3.weight"]["momentum_buffer"].shape == (5, 6)
    hold(grid, drive(grid, on_this_rank)[1], 2)
    copied = DistributedDataParallel(make())
    replicated, copied_norms = drive(copied, on_this_rank)
    hold(copied, copied_norms, 1)
    assert set(replicated.state_by_name()["state"]) == set(make().state_dict()), "names are the model's, not DDP's"
    _drivers()
    return {str(name): count for name, count in calls.get_comm_counts().items()}


def test_weights_equal_one_process() -> None:
    """Four ranks in a row with empty and uneven shards, two by two, and replicas; one step skipped on all."""
    counts = run_ranks(4, _every_kind)
    assert all(count == counts[0] for count in counts), "every rank issues the same"
    by_kind = {kind: sum(n for name, n in counts[0].items() if kind in name) for kind in ("all_gather", "all_reduce")}
    assert by_kind == {"all_gather": sum(rows > 1 for rows in ROWS), "all_reduce": 2}, "matrices; finite and present"
