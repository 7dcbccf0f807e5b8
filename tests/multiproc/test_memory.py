"""Weights are alive only while they are used, in whatever order modules run; gathering goes one unit ahead."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon_runtime as dmuon
from dmuon_runtime.runtime import find_runtime
from dmuon_runtime.unit import Unit, UnitState
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, dedicate, hold_to_reference
from tests.multiproc.models import batch, lm_loss, make

pytestmark = pytest.mark.multiproc


class Backwards(nn.Module):
    """Six linear layers that run in the reverse of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(6))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's output."""
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def _backward(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(5, 12, generator=generator, dtype=torch.float64)).square().mean().backward()


def _watch_alive(run: Run) -> list[int]:
    """Return a list to which every materialisation appends the number of units then alive."""
    units = find_runtime(run.model).schedule.units
    alive: list[int] = []

    def watched(unit: Unit) -> None:
        issue = unit.issue_gather

        def issue_and_count(phase: str) -> None:
            issue(phase)
            alive.append(sum(other.state is not UnitState.FREED for other in units))

        unit.issue_gather = issue_and_count  # type: ignore[method-assign]

    for unit in units:
        watched(unit)
    return alive


def _bytes_alive(model: nn.Module) -> int:
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(size for size in sizes.values() if size > 8)  # what is freed shows one element of 8 bytes


def _memory_laws() -> None:
    hold_to_reference(_backward, Setting(steps=3), Backwards)
    run = dedicate(Backwards(), Setting())
    names, sizes = [n for n, _ in run.model.named_parameters()], [p.numel() for p in run.model.parameters()]
    for step in range(2):
        alive = _watch_alive(run) if step else []
        _backward(run.model, step, dist.get_rank())
        assert _bytes_alive(run.model) == 0, "a backward leaves no weights behind"
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert max(alive) == 2, f"the second step follows the recorded order, one unit ahead: {alive}"
    assert len(alive) == 12
    assert names == [name for name, _ in run.model.named_parameters()]
    assert sizes == [parameter.numel() for parameter in run.model.parameters()]
    for parameter in run.model.parameters():
        assert parameter.isnan().all(), "a freed parameter reads as NaN"
        with pytest.raises(RuntimeError, match="single memory location"):
            parameter.detach().add_(1)


def test_only_what_is_used_is_alive() -> None:
    """Z3 frees after forward and backward, also when modules run against their order of registration."""
    run_ranks(2, _memory_laws)


def _collected() -> None:
    run = dedicate(make(), Setting())
    lm_loss(run.model, batch(0, 0)).backward()
    run.optimizer.step()
    runtime = find_runtime(run.model)
    watched = [weakref.ref(thing) for thing in (run.model, run.optimizer, runtime.transport, *runtime.schedule.units)]
    masters = [weakref.ref(bucket.master) for unit in runtime.schedule.units for bucket in unit.buckets]
    del run, runtime
    gc.collect()
    assert not any(thing() is not None for thing in watched), "what nobody holds is collected"
    assert not any(master() is not None for master in masters), "and its weights with it"


def _z2_laws() -> None:
    run = dedicate(make(), Setting(reshard=False))
    loss = lm_loss(run.model, batch(0, dist.get_rank()))
    held = _bytes_alive(run.model)
    assert held >= sum(parameter.numel() * 8 for parameter in run.model.parameters())
    with dmuon.no_sync(run.model):
        loss.backward()
        lm_loss(run.model, batch(1, dist.get_rank())).backward()
    assert _bytes_alive(run.model) == held, "Z2 keeps weights over micro-batches that do not reduce"
    counted = dmuon.get_counters(run.model).snapshot().comm
    assert counted["muon", "forward"].collectives == dmuon.get_plan(run.model).traffic["muon", "forward"].collectives
    assert ("muon", "backward") not in counted
    run.optimizer.step()
    assert _bytes_alive(run.model) == 0
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_z2_keeps_weights_between_micro_batches() -> None:
    """One materialisation serves all local micro-batches of a step."""
    run_ranks(2, _z2_laws)


def test_dedicated_model_is_collected() -> None:
    """No registry keeps a model, its buffers or its optimizer state alive."""
    run_ranks(1, _collected)
