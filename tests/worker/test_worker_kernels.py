"""Which kernel a policy leaves, and that a change is told with its epoch and step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from dmuon_runtime import ledger
from dmuon_runtime.breaker import BreakerKey, BreakerState, Move, Thresholds
from dmuon_runtime.kernels import registered_kernel
from dmuon_runtime.newton_schulz import Choices, NewtonSchulz
from dmuon_runtime.plan import ParameterPlan, RuntimePlan
from tests.faulty_kernel import Faulty
from worker.contract.kernels import Algorithm, CoefficientSet, Kernel, KernelPolicy, KernelTarget, SwapOrder
from worker.contract.spec import KernelsSpec
from worker.kernels import (
    KernelSwitch,
    check_numerics,
    decide_kernel,
    launched_kernel,
    make_newton_schulz,
    ns_calls,
)
from worker.settings import read_settings

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("configured", "detected", "tripped", "expected"),
    [
        (Kernel.AUTO, Kernel.QUACK, set(), Kernel.AUTO),
        (Kernel.AUTO, Kernel.QUACK, {Kernel.QUACK}, Kernel.CUBLAS),
        (Kernel.AUTO, Kernel.CUBLAS, {Kernel.QUACK}, Kernel.AUTO),
        (Kernel.BLOCKED, Kernel.CUBLAS, {Kernel.BLOCKED}, Kernel.CUBLAS),
        (Kernel.BLOCKED, Kernel.CUBLAS, {Kernel.QUACK}, Kernel.BLOCKED),
    ],
)
def test_a_tripped_kernel_gives_way(
    configured: Kernel, detected: Kernel, tripped: set[Kernel], expected: Kernel
) -> None:
    assert decide_kernel(configured, detected, KernelPolicy(tripped=frozenset(tripped))) == expected


def test_a_switch_changes_once_for_each_epoch() -> None:
    switch = KernelSwitch(KernelsSpec(kernel=Kernel.BLOCKED), CPU, KernelPolicy())
    assert switch.kernel == "blocked"
    assert switch.apply(KernelPolicy(), 1) is None
    tripped = KernelPolicy(epoch=2, tripped=frozenset({Kernel.BLOCKED}))
    note = switch.apply(tripped, 7)
    assert note is not None and note.name == "kernel_changed"
    assert note.data == {"epoch": 2, "step": 7, "kernel": "cublas", "previous": "blocked"}
    assert (switch.kernel, switch.epoch, switch.apply(tripped, 8)) == ("cublas", 2, None)
    back = switch.apply(KernelPolicy(epoch=3), 9)
    assert back is not None and switch.kernel == "blocked"


def test_an_operators_word_holds_for_the_breakers_of_the_ranks() -> None:
    switch = KernelSwitch(KernelsSpec(kernel=Kernel.BLOCKED), CPU, KernelPolicy())
    key = BreakerKey("blocked", 64, "float32")
    switch.guard.at(key).move(Move.TRIP, 0.0, "a test")
    assert switch.apply(KernelPolicy(epoch=1, resets={Kernel.BLOCKED: 1}), 2) is not None
    assert switch.guard.at(key).state is BreakerState.CLOSED
    assert [(moved.before, moved.after) for moved in switch.moved] == [(BreakerState.OPEN, BreakerState.CLOSED)]
    for epoch, field, state in ((2, "disabled", BreakerState.DISABLED), (3, "metrics_only", BreakerState.METRICS_ONLY)):
        switch.apply(KernelPolicy.model_validate({"epoch": epoch, field: {Kernel.BLOCKED}}), 3)
        assert switch.guard.at(key).state is state and switch.kernel == "blocked"
        assert switch.guard.at(BreakerKey("blocked", 128, "float32")).state is state, "those to come, too"
        del switch.guard.breakers[BreakerKey("blocked", 128, "float32")]
    swap = SwapOrder(number=4, target=KernelTarget(kernel=Kernel.CUBLAS))
    before = switch.epoch
    policy = KernelPolicy(epoch=4, metrics_only=frozenset({Kernel.BLOCKED}), swap=swap)
    assert switch.apply(policy, 4) is None and switch.epoch == before, "an order changes nothing by itself"


def test_a_swap_can_be_taken_back_and_keeps_what_it_does_not_name() -> None:
    spec = KernelsSpec(kernel=Kernel.BLOCKED, coefficients=CoefficientSet.YOU)
    switch = KernelSwitch(spec, CPU, KernelPolicy(epoch=2))
    wanted, built = switch.build(KernelTarget(algorithm=Algorithm.DIRECT))
    assert (built.backend, switch.newton_schulz.backend, built.coefficients) == (
        "direct", "gram", switch.newton_schulz.coefficients,
    )  # fmt: skip
    switch.newton_schulz.sampled = torch.tensor(0.25)
    switch.swap_in(wanted, 9)
    assert switch.newton_schulz.last_error == 0.25, "what was measured last stays known"
    assert (switch.newton_schulz.backend, switch.epoch) == ("direct", 9)
    switch.swap_back()
    assert (switch.newton_schulz.backend, switch.kernel, switch.epoch) == ("gram", "blocked", 10)
    later = KernelSwitch(spec, CPU, KernelPolicy(target=KernelTarget(kernel=Kernel.CUBLAS)))
    assert later.kernel == "cublas", "the next attempt begins with what was committed"


def test_a_job_that_says_when_to_start_anew_can_be_swapped_to_the_form_that_does_not() -> None:
    switch = KernelSwitch(KernelsSpec(kernel=Kernel.BLOCKED, restarts=(1, 3)), CPU, KernelPolicy())
    wanted, built = switch.build(KernelTarget(algorithm=Algorithm.DIRECT))
    assert built.backend == "direct"
    switch.swap_in(wanted, 1)
    _, back = switch.build(KernelTarget(algorithm=Algorithm.GRAM))
    assert (back.backend, back.restart_iterations) == ("gram", (1, 3)), "and back to what the spec says"


def test_numbers_are_checked_before_a_swap() -> None:
    calls = ns_calls(plan_of(entry("q", (8, 16), 0), entry("k", (12, 12), 0)), 5, 1)
    before = ledger.snapshot()
    good = make_newton_schulz(KernelsSpec(), Kernel.BLOCKED)
    assert check_numerics(good, calls, 0, CPU, Thresholds()) is None
    with registered_kernel(Faulty("wrong", name="quack", amount=0.05)):
        bad = make_newton_schulz(KernelsSpec(), Kernel.QUACK)
        found = check_numerics(bad, calls, 0, CPU, Thresholds())
    assert found is not None and "random" in found and "above" in found
    assert ledger.snapshot() == before, "what is checked is not counted as work"


def test_an_attempt_may_begin_with_a_tripped_kernel() -> None:
    policy = KernelPolicy(epoch=5, tripped=frozenset({Kernel.BLOCKED}))
    assert KernelSwitch(KernelsSpec(kernel=Kernel.BLOCKED), CPU, policy).kernel == "cublas"


def entry(name: str, shape: tuple[int, ...], owner: int, **changes: object) -> ParameterPlan:
    settings: dict[str, object] = dict.fromkeys(("rule", "unit"), "") | dict.fromkeys(("aliases", "split_rows"), ())
    settings |= dict.fromkeys(("param_dtype", "grad_dtype", "master_dtype", "optim_dtype"), "float32")
    settings |= {"elements": 1, "route": "muon", "matched_overrides": (), "output_dtype": None, "matrix_view": None}
    settings |= {"name": name, "shape": shape, "owner": owner, "cast_forward_inputs": False, "cost": 0.0}
    return ParameterPlan(**(settings | changes))  # type: ignore[arg-type]


def plan_of(*entries: ParameterPlan) -> RuntimePlan:
    return cast(RuntimePlan, SimpleNamespace(parameters=entries))


def test_calls_are_read_from_the_plan() -> None:
    plan = plan_of(
        entry("q", (64, 32), 0),
        entry("experts", (4, 16, 32), 1, matrix_view="experts"),
        entry("qkv", (96, 32), 0, split_rows=(64, 32)),
        entry("norm", (32,), 0, route="adamw"),
    )
    calls = ns_calls(plan, 5, 2)
    assert calls.shapes == (((1, 64, 32), (1, 64, 32), (1, 32, 32)), ((4, 16, 32),))
    assert (calls.dtype, calls.steps) == (torch.float32, 5)
    assert ns_calls(plan_of(entry("q", (8, 8), 0, optim_dtype="bfloat16")), 3, 1).dtype == torch.bfloat16


def test_a_swapped_in_kernel_has_the_same_choices_and_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[object, ...]] = []
    monkeypatch.setattr(NewtonSchulz, "prepare", lambda self, shapes, *_: prepared.append((self.choice.name, shapes)))
    switch = KernelSwitch(KernelsSpec(kernel=Kernel.BLOCKED), CPU, KernelPolicy())
    calls = ns_calls(plan_of(entry("q", (8, 16), 0), entry("k", (8, 8), 1)), 5, 2)
    choices = Choices({"form/x": "gram"})
    switch.prepare(calls, 1, choices)
    switch.apply(KernelPolicy(epoch=1, tripped=frozenset({Kernel.BLOCKED})), 4)
    assert prepared == [("blocked", ((1, 8, 8),)), ("cublas", ((1, 8, 8),))]
    assert switch.newton_schulz.choices == choices


def test_preparing_counts_nothing() -> None:
    switch = KernelSwitch(KernelsSpec(), CPU, KernelPolicy())
    calls = ns_calls(plan_of(entry("q", (8, 16), 0)), 5, 1)
    before = ledger.snapshot()
    choices = switch.measure(calls, lambda _: None)
    switch.prepare(calls, 0, choices)
    assert ledger.snapshot() == before


def test_what_was_launched_is_read_from_the_ledger() -> None:
    before = ledger.snapshot()
    assert launched_kernel(before, ledger.snapshot()) is None
    ns = make_newton_schulz(KernelsSpec(kernel=Kernel.BLOCKED), Kernel.BLOCKED)
    ns.sample_next = True
    ns.orthogonalize([torch.eye(4, 8)])
    assert launched_kernel(before, ledger.snapshot()) == "blocked"
    assert ns.last_error is not None and 0 <= ns.last_error < 0.5 and not ns.sample_next


def test_kernels_are_prepared_before_the_first_step_unless_the_machine_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMUON_PREPARE_KERNELS", raising=False)
    assert read_settings().prepare_kernels
    monkeypatch.setenv("DMUON_PREPARE_KERNELS", "0")
    assert not read_settings().prepare_kernels
