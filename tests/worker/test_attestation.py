"""What is launched is what was chosen, parameter by parameter; what is not is named and stays named."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from dmuon_runtime.breaker import BreakerKey, Move
from dmuon_runtime.kernels import registered_kernel
from dmuon_runtime.plan import RuntimePlan
from tests.faulty_kernel import Faulty, Impostor
from worker.attestation import Attestation
from worker.contract.kernels import Kernel, KernelPolicy
from worker.contract.spec import KernelsSpec
from worker.kernels import KernelSwitch, NsCalls

SHAPES = ((4, 8), (6, 6), (8, 4))
NAMES = ("q", "k", "v")


class Rank:
    """Newton-Schulz of rank 0 of two and its attestation, without training."""

    def __init__(self, kernel: str) -> None:
        cpu = torch.device("cpu")
        entries = [SimpleNamespace(name=name, owner=0, num_matrices=1) for name in NAMES]
        entries += [
            SimpleNamespace(name="other", owner=1, num_matrices=1),
            SimpleNamespace(name="norm", owner=0, num_matrices=0),
        ]
        self.switch = KernelSwitch(KernelsSpec(kernel=Kernel(kernel)), cpu, KernelPolicy())
        calls = NsCalls((SHAPES, ((9, 9),)), torch.float32, 5)
        plan = cast(RuntimePlan, SimpleNamespace(parameters=entries))
        self.attestation = Attestation(0, plan, self.switch, calls)
        self.done: Counter[str] = Counter()
        self.step_number = 0

    def step(self, *, leave_out: str = "", fell_back: bool = False) -> tuple[str, ...]:
        """Do one step; return what the rank says of itself then."""
        self.step_number += 1
        self.attestation.begin()
        names = [name for name in NAMES if name != leave_out]
        matrices = [torch.randn(SHAPES[NAMES.index(name)]) for name in names]
        ns = self.switch.newton_schulz
        if fell_back:
            self.switch.guard.fallback_steps += 1
        with ns.falling_back() if fell_back else nullcontext():
            ns.orthogonalize(matrices)
        self.done.update(names)
        self.attestation.end(self.step_number, self.done, computed=True)
        return self.attestation.offenders


def test_nothing_is_said_while_what_was_chosen_runs() -> None:
    rank = Rank("blocked")
    assert rank.step() == ()
    assert rank.step(fell_back=True) == (), "a call that failed is the fallback's, and counted as such"
    breaker = rank.switch.guard.at(BreakerKey("blocked", 8, "float32"))
    breaker.move(Move.TRIP, 0.0, "a test")
    rank.switch.tripped()
    assert rank.step() == (), "an open breaker chooses the fallback"
    rank.attestation.end(9, rank.done, computed=False)
    assert rank.attestation.offenders == (), "a skipped step has nothing planned"


def test_another_kernel_than_the_chosen_one_is_named_for_good() -> None:
    with registered_kernel(Faulty("none", name="quack")):
        rank = Rank("quack")
        assert rank.step() == ()
    with registered_kernel(Impostor("none", name="quack")):
        (said,) = rank.step()
    assert said.startswith("step 2 launched cublas where quack was chosen"), said
    with registered_kernel(Faulty("none", name="quack")):
        assert rank.step() == (said,), "a step that ran as chosen does not mend the weights"


def test_another_form_than_the_chosen_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel, the other iteration: the numbers are right, and it is not what was asked for."""
    rank = Rank("cublas")
    assert rank.step() == ()
    monkeypatch.setattr(rank.switch.newton_schulz, "backend", "direct")
    (said,) = rank.step()
    assert said == "step 2 ran 3 by cublas direct where 1 by cublas direct and 2 by cublas gram was chosen"


def test_matrices_that_nothing_was_launched_for_are_named() -> None:
    impostor = Impostor("none", name="quack")
    impostor.silently = True
    with registered_kernel(impostor):
        rank = Rank("quack")
        (said,) = rank.step()
    assert said == "step 1 counted matrices of quack direct and quack gram, of which nothing was launched"


def test_a_fallback_that_nobody_asked_for_is_named() -> None:
    rank = Rank("blocked")
    rank.attestation.begin()
    with rank.switch.newton_schulz.falling_back():
        rank.switch.newton_schulz.orthogonalize([torch.randn(4, 8)])
    rank.done.update(NAMES)
    rank.attestation.end(1, rank.done, computed=True)
    assert rank.attestation.offenders == ("step 1 launched cublas where blocked was chosen",)


def test_a_parameter_that_is_left_out_is_named_though_another_makes_up_the_sum() -> None:
    rank = Rank("cublas")
    assert rank.step() == ()
    rank.done["q"] += 1
    (said,) = rank.step(leave_out="k")
    assert said == "orthogonalised matrices of k 1 instead of 2, q 3 instead of 2"
