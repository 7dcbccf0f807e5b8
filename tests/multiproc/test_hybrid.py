"""Parameters left to FSDP2 or DDP train in the same optimizer: one step, one norm, one decision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, assert_planned, meshes, world_mesh
from tests.multiproc.models import POLICY, batch, lm_loss, make
from tests.multiproc.reference import PolarNewtonSchulz, ReferenceTrainer

pytestmark = pytest.mark.multiproc


def _matrices(name: str, parameter: nn.Parameter) -> bool:
    """What the runtime takes: the projections; embedding, head, norms, biases and gains are left to others."""
    return name.endswith(("up.weight", "down.weight"))


def _dedicate(replicas: int = 1, storage: str = "sharded") -> nn.Module:
    model = make()
    mesh, replicate_mesh = meshes(replicas)
    dmuon.dedicate_params(model, mesh, _matrices, param_policy=POLICY, replicate_mesh=replicate_mesh, storage=storage)
    return model


def _fully_shard(model: nn.Module, replicas: int = 1, each_block: bool = True) -> nn.Module:
    mesh = world_mesh()
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("r", "s"))
    for block in model.get_submodule("layers").children() if each_block else ():
        fully_shard(block, mesh=mesh, ignored_params=dmuon.ignored_params(model))
    fully_shard(model, mesh=mesh, ignored_params=dmuon.ignored_params(model))
    return model


def _wrap(model: nn.Module) -> nn.Module:
    dmuon.ignore_in_ddp(model)
    return DistributedDataParallel(model)


def _optimizer(model: nn.Module) -> dmuon.Muon:
    return dmuon.Muon(model, weight_decay=0.1, ns_backend=PolarNewtonSchulz())


def _loss(model: nn.Module, step: int, micro: int = 0) -> torch.Tensor:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    tokens = batch(step, dist.get_rank(), micro)
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _poison(model: nn.Module, optimizer: dmuon.Muon, step: int) -> None:
    """A step with an infinite gradient on one rank, of a guest, is skipped everywhere and names it."""
    _loss(model, step).backward()
    guest = next(guest for guest in optimizer.guests if guest.name.endswith("embed.weight"))
    if dist.get_rank() == 1 or guest.manager == "ddp":  # DDP leaves the same gradient on every rank
        guest.gradient.fill_(math.inf)
    assert not math.isfinite(dmuon.clip_grad_norm_(optimizer, 1.0))
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.offenders == (guest.name,)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def _train(model: nn.Module, steps: int, max_norm: float) -> tuple[dmuon.Muon, list[float]]:
    optimizer, norms = _optimizer(model), []
    for step in range(steps):
        _poison(model, optimizer, step)
        _loss(model, step).backward()
        norms.append(float(dmuon.clip_grad_norm_(optimizer, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, norms


def _hold(model: nn.Module, optimizer: dmuon.Muon, norms: list[float], accumulate: bool = False) -> None:
    """The same as one process: weights of own parameters and guests, and the global norm."""

    def backward(model: nn.Module, step: int, rank: int) -> None:
        for micro in range(3 if accumulate else 1):
            lm_loss(model, batch(step, rank, micro)).backward()

    plain = make()
    routes = {name: "muon" if _matrices(name, p) else "adamw" for name, p in plain.named_parameters()}
    trainer = ReferenceTrainer(plain, routes, dist.get_world_size(), weight_decay=0.1, max_norm=0.5)
    for step in range(3):
        trainer.step(backward, step)
    assert norms == pytest.approx(trainer.norms, rel=1e-6)
    assert_planned(Run(model, optimizer, []))
    state = dmuon.get_model_state_dict(model)
    dmuon.set_model_state_dict(model, {name: value * 3 for name, value in state.items()})
    dmuon.set_model_state_dict(model, state)
    state = dmuon.get_model_state_dict(model)
    for name, value in plain.named_parameters():
        error = float((state[name] - value.detach()).norm() / value.detach().norm())
        assert error < 1e-11, f"{name}: {error}"
    rows = dmuon.summarize_param_groups(model, optimizer)
    assert {str(row["name"]) for row in rows["guests"]} == {name for name, route in routes.items() if route == "adamw"}  # type: ignore[union-attr, attr-defined, index]
    kinds = {str(group.get("manager", "own")) for group in optimizer.param_groups}
    assert len(kinds) == 2 and {group["route"] for group in optimizer.param_groups} == {"muon", "adamw"}


def _with_fsdp(replicas: int) -> None:
    model = _fully_shard(_dedicate(replicas), replicas, each_block=replicas > 1)
    _hold(model, *_train(model, 3, 0.5))


def _with_ddp() -> None:
    model = _wrap(_dedicate())
    _hold(model, *_train(model, 3, 0.5))


def test_weights_and_norms_equal_one_process() -> None:
    """FSDP2 beside the runtime on one axis (in one group) and on a grid (in one for each block), and DDP.

    Before each step another one is skipped.
    """
    run_ranks(2, _with_fsdp, 1)
    run_ranks(4, _with_fsdp, 2)
    run_ranks(2, _with_ddp)


def _accumulation() -> None:
    for wrap in (_fully_shard, _wrap):
        model = wrap(_dedicate())
        optimizer, norms = _optimizer(model), []
        for step in range(3):
            with dmuon.no_sync(model):
                with dmuon.no_sync(model):
                    _loss(model, step, 0).backward()
                _loss(model, step, 1).backward()
            _loss(model, step, 2).backward()
            norms.append(float(dmuon.clip_grad_norm_(optimizer, 0.5)))
            optimizer.step()
            model.zero_grad()  # of the wrapper, or of the model: as good as the optimizer's
        passes = dmuon.get_counters(model).snapshot().comm["muon", "reduce"].collectives
        assert passes == 3 * dmuon.get_plan(model).traffic["muon", "reduce"].collectives
        _hold(model, optimizer, norms, accumulate=True)


def test_local_micro_batches() -> None:
    """One ``no_sync``, nested, holds for all three kinds of parameters."""
    run_ranks(2, _accumulation)


def _refusals() -> None:
    model = _dedicate()
    with pytest.raises(dmuon.UnmanagedParameters, match=r"embed\.weight.*lm_head\.weight"):
        dmuon.Muon(model)
    with pytest.raises(NotImplementedError, match="non-contiguous"):  # torch's own word: a freed parameter is no tensor
        fully_shard(model, mesh=world_mesh())
    taken = fully_shard(_dedicate(storage="replicated"), mesh=world_mesh())
    with pytest.raises(dmuon.ParametersChanged, match=r"layers\.0\.up\.weight.*ignored_params"):
        dmuon.Muon(taken)
    with pytest.raises(dmuon.ParametersChanged, match=r"DDP reduces them as well.*layers\.0.*ignore_in_ddp"):
        dmuon.Muon(DistributedDataParallel(_dedicate(storage="replicated")))
    sharded = make()
    fully_shard(sharded, mesh=world_mesh())
    with pytest.raises(dmuon.AlreadySharded, match=r"norm\.weight on .*before fully_shard"):
        dmuon.dedicate_params(sharded, world_mesh(), lambda *_: True, param_policy=POLICY)
    with pytest.raises(dmuon.AlreadySharded, match="under DDP"):
        dmuon.dedicate_params(DistributedDataParallel(make()), world_mesh(), lambda *_: True, param_policy=POLICY)
    model = _dedicate()
    model.get_submodule("layers.0").up.weight = nn.Parameter(torch.zeros(20, 12))
    with pytest.raises(dmuon.ParametersChanged, match=r"layers\.0\.up\.weight"):
        dmuon.Muon(model)
    model = _fully_shard(_dedicate())
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(dmuon.ParamGroupError, match=r"position 1 a tensor of shape \(3,\).*no group has.*embed"):
        dmuon.Muon(model, param_groups=[{"params": [model.get_parameter("layers.0.up.weight"), stranger]}])


def test_wrong_order_of_calls_is_refused() -> None:
    """Nobody's parameters, parameters taken twice, dedication after sharding or wrapping, replaced, foreign."""
    run_ranks(2, _refusals)
