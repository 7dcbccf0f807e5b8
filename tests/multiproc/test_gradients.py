"""Accumulation, missing gradients, sharing, freezing and clearing: equal to one process, agreed on all ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, dedicate, hold_to_reference
from tests.multiproc.models import ToyLM, batch, lm_loss, make
from tests.multiproc.reference import Backward

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
    with torch.inference_mode():
        lm_loss(model, batch(step, rank, 8), (1, 0, 2))


ACCUMULATIONS: tuple[tuple[Backward, Backward, int | None], ...] = (
    (_accumulate, _accumulate, 3),
    (_accumulate_locally, _accumulate, 1),
    (_accumulate_all_locally, _accumulate, 1),
    (_uneven, _uneven, None),
    (_two_graphs, _two_graphs, 2),
    (_one_graph_twice, _one_graph_twice, 2),
    (_summed, _summed, 1),
    (_with_evaluation, _with_evaluation, 1),
)
"""What a rank runs in a step, what the reference runs, and how often it reduces (None: ranks differ)."""


def accumulation_laws(setting: Setting) -> None:
    """Hold every form of accumulation to one process, and count how often it reduces in ``setting.steps`` steps."""
    for backward, reference, reductions in ACCUMULATIONS:
        try:
            run = hold_to_reference(backward, setting, reference_backward=reference)
        except AssertionError as error:
            raise AssertionError(f"{backward.__name__}: {error}") from error
        counted = dmuon.get_counters(run.model).snapshot().comm["muon", "reduce"].collectives
        planned = dmuon.get_plan(run.model).rank_traffic[dist.get_rank()]["muon", "reduce"].collectives
        assert reductions is None or counted == reductions * setting.steps * planned, backward.__name__


def _accumulation_laws() -> None:
    for setting in MODES:
        accumulation_laws(setting)
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


def missing_laws(setting: Setting) -> None:
    """Hold ranks without gradients, unused blocks, frozen and tied weights to one process."""
    hold_to_reference(_some_ranks_sit_out, replace(setting, steps=4))
    hold_to_reference(_nobody_calls_block_one, replace(setting, steps=4, max_norm=1.0))
    hold_to_reference(_one, setting, _frozen)
    for tied in ("head_first", "embed_first"):
        run = hold_to_reference(_one, setting, lambda tied=tied: make(tied=tied))  # type: ignore[misc]
        state = dmuon.get_model_state_dict(run.model)
        assert torch.equal(state["embed.weight"], state["lm_head.weight"])
        assert set(state) == set(make(tied=tied).state_dict())


def _missing_laws() -> None:
    for setting in MODES:
        missing_laws(setting)


def test_missing_tied_and_frozen() -> None:
    """Ranks without any gradient, parameters without one on all ranks, frozen and tied weights."""
    run_ranks(2, _missing_laws)


def clearing_laws(setting: Setting) -> None:
    """``zero_grad`` at every place discards what is pending; where ranks differ in it, the step says so."""

    def loop(run: Run, setting: Setting) -> None:
        for step in range(setting.steps):
            _one(run.model, step, dist.get_rank(), micro=5)
            run.optimizer.zero_grad()
            with dmuon.no_sync(run.model):
                _one(run.model, step, dist.get_rank(), micro=6)
            run.optimizer.zero_grad()
            if dist.get_rank() == 0:
                _one(run.model, step, 0, micro=7)
            run.model.zero_grad()  # rank 1 takes part in that backward only when it steps
            run.optimizer.step()
            _one(run.model, step, dist.get_rank(), micro=8)
            run.optimizer.zero_grad()  # its last reductions are in flight, and no step has waited for them
            _one(run.model, step, dist.get_rank())
            run.optimizer.step()
            run.optimizer.zero_grad()

    hold_to_reference(_one, setting, loop=loop)
    run = dedicate(make(), setting)
    if dist.get_rank() == 0:
        _one(run.model, 0, 0)
        run.optimizer.zero_grad()
    _one(run.model, 0, dist.get_rank())
    with pytest.raises(dmuon.CallMismatch, match="zero_grad"):
        run.optimizer.step()


def _clearing_laws() -> None:
    for setting in MODES:
        clearing_laws(setting)


def non_finite_laws(setting: Setting = TWO) -> None:
    """A skipped step leaves no trace on any rank; with "raise" every rank raises; clipping does no harm before."""
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
            on_device = weight.device.type == "cuda"
            assert run.optimizer.last_step.computed == on_device, "a device withholds by itself what it computed"
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

    hold_to_reference(_one, replace(setting, max_norm=0.5), loop=loop)
    _finite_law(setting)


def _finite_law(setting: Setting) -> None:
    """Gradients whose sum overflows are finite all the same, and each call for them sees the gradient that is there."""
    run = dedicate(make(), setting)
    for fraction in (0.25, 0.125):
        _one(run.model, 0, dist.get_rank())
        dmuon.clip_grad_norm_(run.optimizer, math.inf)  # reduces
        for piece in run.optimizer.pieces:
            piece.gradient.fill_(torch.finfo(piece.gradient.dtype).max * fraction)
            assert piece.bucket.gradient is not None
            assert piece.gradient.data_ptr() == piece.view(piece.bucket.gradient).data_ptr()
        run.optimizer.step()
        assert run.optimizer.last_step is not None
        assert not run.optimizer.last_step.skipped
        run.optimizer.zero_grad()
        assert not any(piece.bucket.gradient_parts for piece in run.optimizer.pieces), "they would keep the memory"


def test_clearing_and_non_finite() -> None:
    """``zero_grad`` discards what is pending everywhere; a skipped step leaves no trace in weights or state."""
    run_ranks(2, _clearing_laws)
    run_ranks(2, non_finite_laws)


def norm_law(setting: Setting = TWO) -> None:
    """The norm is torch's own of the mean gradient, before and after clipping."""
    run = dedicate(make(), setting)
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
    run_ranks(3, norm_law)
