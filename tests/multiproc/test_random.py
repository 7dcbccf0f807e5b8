"""Random programs, different on every rank: results equal one process, and the order of collectives is shared."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, hold_to_reference
from tests.multiproc.models import ToyLM, batch, lm_loss, make
from tests.multiproc.reference import Backward

pytestmark = pytest.mark.multiproc


def _program(seed: int, dedicated: bool) -> Backward:
    """Return a backward whose passes, calls, evaluations and local accumulation are drawn by seed, step and rank."""

    def backward(model: nn.Module, step: int, rank: int) -> None:
        draw = random.Random(f"{seed} {step} {rank}")
        waiting: list[torch.Tensor] = []
        for micro in range(draw.randint(0, 3)):
            tokens, calls = batch(step, rank, micro), (draw.randint(0, 2), draw.randint(0, 2), draw.randint(0, 2))
            kind = draw.choice(["evaluate", "train", "train", "local", "later"])
            if kind == "evaluate":
                with torch.no_grad():
                    lm_loss(model, tokens, calls)
                continue
            quiet = dedicated and kind == "local"
            with dmuon.no_sync(model) if quiet else contextlib.nullcontext():
                loss = lm_loss(model, tokens, calls)
                if kind == "later":
                    waiting.append(loss)
                else:
                    loss.backward()
        for loss in waiting:
            loss.backward()

    return backward


def programs(seeds: list[int], mode: str, base: Setting | None = None) -> None:
    """Hold the program of each seed to one process; the seed also says which of Z2 and Z3, and which groups."""
    for seed in seeds:

        def build(mode: str = mode) -> ToyLM:
            return make(mode)

        group_policy = "shared" if seed % 5 == 0 else "isolated"
        setting = replace(base or Setting(), steps=3, reshard=seed % 3 != 0, group_policy=group_policy)
        try:
            hold_to_reference(_program(seed, True), setting, build, reference_backward=_program(seed, False))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize(("world_size", "mode"), [(2, "plain"), (3, "reentrant"), (4, "saved")])
def test_randomprograms(world_size: int, mode: str) -> None:
    """Passes, calls, evaluations, postponed backwards and local accumulation drawn for each rank and step."""
    run_ranks(world_size, programs, list(range(6)), mode, deadline_s=100)
