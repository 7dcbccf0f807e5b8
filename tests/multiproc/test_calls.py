"""However modules are called, and however ranks differ in it, training equals one process and no rank hangs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, hold_to_reference
from tests.multiproc.models import ToyLM, batch, lm_loss, make
from tests.multiproc.reference import Backward

pytestmark = pytest.mark.multiproc

DIVERGENT = ((0, 1, 3), (2, 0, 1), (1, 2, 0))
"""Calls of each block by rank: every block is skipped on one rank and repeated on another."""
MODES = ("plain", "tuple", "dataclass", "keywords", "reentrant", "saved")


def calling(calls_by_rank: tuple[tuple[int, ...], ...]) -> Backward:
    """One forward and backward with its own calls on each rank; they change from step to step."""

    def backward(model: nn.Module, step: int, rank: int) -> None:
        calls = calls_by_rank[(rank + step) % len(calls_by_rank)]
        lm_loss(model, batch(step, rank), calls).backward()

    return backward


def _setting(reshard: bool, group_policy: str = "isolated") -> Setting:
    return Setting(steps=3, reshard=reshard, group_policy=group_policy)


def _modes(reshard: bool, calls: tuple[tuple[int, ...], ...]) -> None:
    for mode in MODES:

        def build(mode: str = mode) -> ToyLM:
            return make(mode)

        try:
            hold_to_reference(calling(calls), _setting(reshard), build)
        except AssertionError as error:
            raise AssertionError(f"mode {mode}: {error}") from error
    hold_to_reference(calling(calls), _setting(reshard, "shared"), make)


@pytest.mark.parametrize("reshard", [True, False], ids=["z3", "z2"])
def test_ranks_call_differently(reshard: bool) -> None:
    """Blocks are called 0, 1, 2 and 3 times, differently on each of 3 ranks and in each step, in six output shapes."""
    run_ranks(3, _modes, reshard, DIVERGENT)


@pytest.mark.parametrize("calls", [(1, 1, 1), (2, 0, 3)], ids=str)
def test_ranks_call_alike(calls: tuple[int, ...]) -> None:
    """The same calls on both ranks: once each, and repeated with one block skipped everywhere."""
    run_ranks(2, _modes, True, (calls,))


class _PassingBlock(nn.Module):
    """The first makes a tensor that all others only hand on, as relative position biases are."""

    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12, bias=False)
        if makes:
            self.gain = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the block's output and the shared tensor [12]."""
        shared = self.gain.sin() if shared is None else shared
        return x + self.down(F.gelu(self.up(x) * shared.mean())), shared


class _Passing(ToyLM):
    """Blocks return one of their inputs as it is: its gradient comes when their own backward is over."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList(_PassingBlock(index == 0) for index in range(3))

    def forward(self, tokens: Tensor, calls: tuple[int, ...] = (1, 1, 1)) -> Tensor:
        """Return logits."""
        x, shared = self.embed(tokens), None
        for block in self.layers:
            x, shared = block(x, shared)
        return self.lm_head(self.norm(x))


class _Table(nn.Module):
    """Returns its weight, or a view of it, as learned positions and queries do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(9, 12))
        self.how = how

    def forward(self, length: int) -> Tensor | tuple[dict[str, Tensor], int]:
        """Return [length, 12], or all of [9, 12]."""
        if self.how == "whole":
            return self.gain
        return self.gain[:length] if self.how == "rows" else ({"rows": self.gain[:length]}, length)


class _Positions(ToyLM):
    """Multiplies by what a table returns, so that its values are read after it and again in the backward."""

    def __init__(self, how: str) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.table = _Table(how)
        nn.init.normal_(self.table.gain, mean=1.0, std=0.3)

    def _call(self, block: nn.Module, x: Tensor) -> Tensor:
        found = self.table(x.shape[1])
        rows = found[0]["rows"] if isinstance(found, tuple) else found
        return super()._call(block, x * rows[: x.shape[1]])


def _passed_through() -> None:
    for reshard in (True, False):
        hold_to_reference(calling(((1, 1, 1),)), _setting(reshard), lambda: _Passing().double())
        for how in ("whole", "rows", "nested"):
            run = hold_to_reference(
                calling(((1, 1, 1),)),
                _setting(reshard),
                lambda how=how: _Positions(how).double(),  # type: ignore[misc]
            )
            with torch.no_grad():
                kept = run.model.table(7)
            run.optimizer.step()
            kept = kept[0]["rows"] if isinstance(kept, tuple) else kept
            assert kept.isfinite().all(), "what a caller keeps stays readable"


def test_inputs_handed_on() -> None:
    """An output that is an input must not bring the weights back; one that is a weight must not lose its memory."""
    run_ranks(2, _passed_through)
