"""Compiled blocks inside a dedicated model: they train as eager ones do, and do not compile again at each step."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, assert_same_order, assert_traffic, dedicate
from tests.multiproc.models import batch, lm_loss, make

pytestmark = pytest.mark.multiproc

STEPS = 4


class _Counting:
    """A backend that counts graphs and runs them through aot_eager: no C++ compiler is needed."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def _train(backend: _Counting | None, reshard: bool, inner: bool) -> dict[str, Tensor]:
    """Train with every block compiled, as a whole or (``inner``) inside its boundary; return all weights."""
    model = make(dtype=torch.float64)
    run = dedicate(model, Setting(reshard=reshard))
    if backend is not None:
        for block in model.layers:
            _compile(block, backend, inner)
    for step in range(STEPS):
        lm_loss(model, batch(step, dist.get_rank())).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert_same_order(run)
    assert_traffic(run, STEPS)
    return dmuon.get_model_state_dict(model)


def _compile(block: nn.Module, backend: _Counting, inner: bool) -> None:
    if inner:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)  # type: ignore[method-assign]
    else:
        block.compile(backend=backend)


def _laws(inner: bool) -> None:
    for reshard in (True, False):
        torch._dynamo.reset()
        eager, backend = _train(None, reshard, inner), _Counting()
        compiled = _train(backend, reshard, inner)
        for name, value in eager.items():
            assert torch.allclose(compiled[name], value, rtol=1e-10, atol=1e-13), name
        assert 0 < backend.graphs <= 12, f"{backend.graphs} graphs of 3 blocks in {STEPS} steps"


def test_forward_of_a_block_compiles_whole() -> None:
    """The boundary's hooks stay outside: one graph without a break."""
    run_ranks(2, _laws, True, deadline_s=120)


def _inductor() -> None:
    torch._dynamo.reset()
    model = make(dtype=torch.float32)
    eager = _train(None, True, True)
    run = dedicate(model, Setting())
    for block in model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True)  # type: ignore[method-assign]
    for step in range(STEPS):
        lm_loss(model, batch(step, dist.get_rank())).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    for name, value in dmuon.get_model_state_dict(model).items():
        assert torch.allclose(value.double(), eager[name], rtol=1e-3, atol=1e-4), name


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_blocks_compile_by_inductor() -> None:
    """The default backend, with code that it generates for this CPU."""
    run_ranks(2, _inductor, deadline_s=170)


def test_compiled_modules_keep_their_hooks() -> None:
    """``module.compile()`` of the boundary itself: hooks are part of the call."""
    run_ranks(2, _laws, False, deadline_s=120)
