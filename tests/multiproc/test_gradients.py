"""Accumulation, missing gradients, sharing, freezing and clearing: equal to one process, agreed on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, dedicate, hold_to_reference
from tests.multiproc.models import ToyLM, batch, lm_loss, make

pytestmark = pytest.mark.multiproc

TWO = Setting(steps=2)
MODES = (TWO, Setting(steps=2, reshard=False))


def _one(model: nn.Module, step: int, rank: int, micro: int = 0) -> None:
    lm_loss(model, batch(step, rank, micro)).backward()


def _accumulate(model: nn.Module, step: int, rank: int) -> None:
    for micro in range(3):
        _one(model, step, rank, micro)


@contextlib.contextmanager
def _local(model: nn.Module) -> Iterator[None]:
    with dmuon.no_sync(model), dmuon.no_sync(model):
        pass
    with dmuon.no_sync(model):
        yield


def _accumulate_locally(model: nn.Module, step: int, rank: int) -> None:
    """Two micro-batches without reduction, the last one with, on a dedicated model."""
    with _local(model):
        _one(model, step, rank, 0)
        _one(model, step, rank, 1)
    _one(model, step, rank, 2)


def _accumulate_all_locally(model: nn.Module, step: int, rank: int) -> None:
    with dmuon.no_sync(model):
        _accumulate(model, step, rank)


def _uneven(model: nn.Module, step: int, rank: int) -> None:
    """Rank r has r micro-batches: rank 0 has none at all."""
    for micro in range(rank):
        _one(model, step, rank, micro)


def _two_graphs(model: nn.Module, step: int, rank: int) -> None:
    losses = [lm_loss(model, batch(step, rank, micro)) for micro in range(2)]
    for loss in losses:
        loss.backward()


def _one_graph_twice(model: nn.Module, step: int, rank: int) -> None:
    loss = lm_loss(model, batch(step, rank))
    loss.backward(retain_graph=True)
    (loss * loss).backward()


def _summed(model: nn.Module, step: int, rank: int) -> None:
    (lm_loss(model, batch(step, rank, 0)) + lm_loss(model, batch(step, rank, 1))).backward()


def _with_evaluation(model: nn.Module, step: int, rank: int) -> None:
    with torch.no_grad():
        for _ in range(1 + rank):
            lm_loss(model, batch(step, rank, 7))
    _one(model, step, rank)
    with torch.no_grad():
        lm_loss(model, batch(step, rank, 8), (1, 0, 2))


def _accumulation_laws() -> None:
    for setting in MODES:
        run = hold_to_reference(_accumulate, setting)
        passes = dmuon.get_counters(run.model).snapshot().comm["muon", "reduce"].collectives
        assert passes == 6 * dmuon.get_plan(run.model).traffic["muon", "reduce"].collectives
        run = hold_to_reference(_accumulate_locally, setting, reference_backward=_accumulate)
        passes = dmuon.get_counters(run.model).snapshot().comm["muon", "reduce"].collectives
        assert passes == 2 * dmuon.get_plan(run.model).traffic["muon", "reduce"].collectives
        hold_to_reference(_accumulate_all_locally, setting, reference_backward=_accumulate)
        for backward in (_uneven, _two_graphs, _one_graph_twice, _summed, _with_evaluation):
            try:
                hold_to_reference(backward, setting)
            except AssertionError as error:
                raise AssertionError(f"{backward.__name__}: {error}") from error
    for mode in ("reentrant", "saved"):
        for backward in (_accumulate, _two_graphs, _summed, _with_evaluation):
            hold_to_reference(backward, TWO, lambda mode=mode: make(mode))  # type: ignore[misc]


def test_accumulation() -> None:
    """Several backwards, local ones, uneven ones, several graphs: always the mean of all gradients of the step."""
    run_ranks(3, _accumulation_laws, deadline_s=100)


def _some_ranks_sit_out(model: nn.Module, step: int, rank: int) -> None:
    if (rank + step) % 2:
        _one(model, step, rank)


def _nobody_calls_block_one(model: nn.Module, step: int, rank: int) -> None:
    lm_loss(model, batch(step, rank), (1, step % 2, 1)).backward()


def _frozen() -> ToyLM:
    model = make()
    model.layers[0].requires_grad_(False)
    model.layers[2].up.weight.requires_grad_(False)
    return model


def _missing_laws() -> None:
    for setting in MODES:
        hold_to_reference(_some_ranks_sit_out, Setting(steps=4, reshard=setting.reshard))
        hold_to_reference(_nobody_calls_block_one, Setting(steps=4, reshard=setting.reshard, max_norm=1.0))
        hold_to_reference(_one, setting, _frozen)
        for tied in ("head_first", "embed_first"):
            run = hold_to_reference(_one, setting, lambda tied=tied: make(tied=tied))  # type: ignore[misc]
            state = dmuon.get_model_state_dict(run.model)
            assert torch.equal(state["embed.weight"], state["lm_head.weight"])
            assert set(state) == set(make(tied=tied).state_dict())


def test_missing_tied_and_frozen() -> None:
    """Ranks without any gradient, parameters without one on all ranks, frozen and tied weights."""
    run_ranks(2, _missing_laws)


def _clearing_laws() -> None:
    def loop(run: Run, setting: Setting) -> None:
        for step in range(setting.steps):
            _one(run.model, step, dist.get_rank(), micro=5)
            run.optimizer.zero_grad()
            with dmuon.no_sync(run.model):
                _one(run.model, step, dist.get_rank(), micro=6)
            run.optimizer.zero_grad()
            if dist.get_rank() == 0:
                _one(run.model, step, 0, micro=7)
            run.optimizer.zero_grad()  # rank 1 takes part in that backward only when it steps
            run.optimizer.step()
            _one(run.model, step, dist.get_rank())
            run.optimizer.step()
            run.optimizer.zero_grad()

    for setting in MODES:
        hold_to_reference(_one, setting, loop=loop)
    run = dedicate(make(), TWO)
    if dist.get_rank() == 0:
        _one(run.model, 0, 0)
        run.optimizer.zero_grad()
    _one(run.model, 0, dist.get_rank())
    with pytest.raises(dmuon.CallMismatch, match="zero_grad"):
        run.optimizer.step()


def _non_finite_laws() -> None:
    poisoned = "layers.1.up.weight"

    def loop(run: Run, setting: Setting) -> None:
        weight = dict(run.model.named_parameters())[poisoned]
        for step in range(setting.steps):
            before = dmuon.get_model_state_dict(run.model)
            handle = weight.register_hook(lambda g: g * float("nan") if dist.get_rank() == 1 else g)
            _one(run.model, step, dist.get_rank(), micro=3)
            handle.remove()
            dmuon.clip_grad_norm_(run.optimizer, 1.0)
            run.optimizer.step()
            assert run.optimizer.last_step is not None
            assert run.optimizer.last_step.skipped
            assert run.optimizer.last_step.offenders == (poisoned,)
            after = dmuon.get_model_state_dict(run.model)
            assert all(torch.equal(before[name], after[name]) for name in before if name != "seen")
            run.optimizer.non_finite = "raise"
            with pytest.raises(dmuon.NonFiniteGradient, match=poisoned):
                run.optimizer.step()
            run.optimizer.non_finite = "skip"
            run.optimizer.zero_grad()
            _one(run.model, step, dist.get_rank())
            dmuon.clip_grad_norm_(run.optimizer, 0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()

    hold_to_reference(_one, Setting(steps=2, max_norm=0.5), loop=loop)


def test_clearing_and_non_finite() -> None:
    """``zero_grad`` discards what is pending everywhere; a skipped step leaves no trace in weights or state."""
    run_ranks(2, _clearing_laws)
    run_ranks(2, _non_finite_laws)


def _norm_law() -> None:
    run = dedicate(make(), Setting())
    plain = make()
    loss = sum(lm_loss(plain, batch(0, rank)) for rank in range(dist.get_world_size())) / dist.get_world_size()
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    _one(run.model, 0, dist.get_rank())
    assert torch.allclose(dmuon.clip_grad_norm_(run.optimizer, 0.1).double(), expected, rtol=1e-6)
    assert torch.allclose(dmuon.clip_grad_norm_(run.optimizer, 9.9).double(), torch.tensor(0.1).double(), rtol=1e-5)


def test_norm_counts_every_element_once() -> None:
    """Torch's own norm of the mean gradient, owners and shards together, before and after clipping."""
    run_ranks(3, _norm_law)
