"""The fused passes of an update on a GPU: what plain torch does, and nothing at all behind a closed gate."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dmuon_runtime import adamw, updates
from dmuon_runtime._elementwise import normalize_into
from dmuon_runtime.adamw import AdamWSettings, AdamWTensors, adamw_update
from dmuon_runtime.matrix_updates import MatrixUpdates
from dmuon_runtime.newton_schulz import NewtonSchulz
from dmuon_runtime.updates import apply_changes, momentum_updates

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = (1, 7, 4096, 4097, 100_003)
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-2}
"""By the dtype of the state: plain torch rounds it between two operations, the fused kernels once (values below 8)."""


def _random(size: int, dtype: torch.dtype = torch.float32, offset: int = 1) -> Tensor:
    """A slice that begins off every alignment, as a parameter does in the middle of a bucket."""
    return torch.randn(size + offset, device="cuda").to(dtype)[offset:]


def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (updates, adamw):
        monkeypatch.setattr(module, "fused_for", lambda tensors: None)


def _gates() -> list[Tensor | None]:
    return [None, torch.ones((), device="cuda"), torch.zeros((), device="cuda")]


def _close(found: Tensor, expected: Tensor, state: torch.dtype) -> None:
    tolerance = TOLERANCE[state]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum(dtype: torch.dtype, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cases = [([_random(size, dtype) for size in SIZES], [_random(size) for size in SIZES]) for _ in _gates()]
    mine = [[x.clone() for x in buffers] for buffers, _ in cases]
    found = [
        momentum_updates(buffers, gradients, 0.95, nesterov, gate)
        for buffers, (_, gradients), gate in zip(mine, cases, _gates(), strict=True)
    ]
    _plain(monkeypatch)
    for (buffers, gradients), after, aheads, gate in zip(cases, mine, found, _gates(), strict=True):
        before = [x.clone() for x in buffers]
        expected = momentum_updates(buffers, gradients, 0.95, nesterov, gate)
        for start, plain, fused, ahead, other in zip(before, buffers, after, aheads, expected, strict=True):
            assert ahead.dtype == other.dtype and (nesterov or ahead is fused)
            _close(fused, plain, dtype)
            _close(ahead, other, dtype)
            assert gate is None or gate > 0 or torch.equal(fused, start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_apply_changes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    scales = [0.2 * (1 + place) for place in range(len(SIZES))]
    cases = [([_random(size, dtype) for size in SIZES], [_random(size) for size in SIZES]) for _ in _gates()]
    mine = [[x.clone() for x in weights] for weights, _ in cases]
    found = [
        apply_changes(weights, directions, scales, 0.02, 1e-3, gate)
        for weights, (_, directions), gate in zip(mine, cases, _gates(), strict=True)
    ]
    _plain(monkeypatch)
    for (weights, directions), after, sums, gate in zip(cases, mine, found, _gates(), strict=True):
        before = [x.clone() for x in weights]
        expected = apply_changes(weights, directions, scales, 0.02, 1e-3, gate)
        for start, plain, fused, squares, other in zip(before, weights, after, sums, expected, strict=True):
            _close(fused, plain, dtype)
            torch.testing.assert_close(squares.double().sum(), other, rtol=1e-5, atol=0)
            assert gate is None or gate > 0 or (torch.equal(fused, start) and squares.sum() == 0)


def _launched(call: Callable[[], object]) -> list[str]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        call()
        torch.cuda.synchronize()
    return [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_one_launch_does_many_tensors_and_nobody_waits() -> None:
    """Aligned ones and others are a launch each; a table is copied to the device only where an address is new."""
    torch.manual_seed(4)
    aligned, odd = ([_random(size, offset=offset) for size in (64, 4096, 12_288)] for offset in (0, 1))
    tensors = [x for pair in zip(aligned, odd, strict=True) for x in pair]
    gate, others = torch.ones((), device="cuda"), [x.clone() for x in tensors]
    directions = [torch.randn_like(x) for x in tensors]

    def both() -> None:
        momentum_updates(others, tensors, 0.9, False, gate)
        apply_changes(tensors, directions, [1.0] * len(tensors), 0.1, 0.01, gate)

    both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
        momentum_updates([x.clone() for x in tensors], others, 0.9, True, gate)  # new addresses
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = _launched(both)
    assert sorted(names) == ["_apply_change"] * 2 + ["_momentum"] * 2, names


def _update(members: list[Any], newton_schulz: NewtonSchulz) -> None:
    """What ``Muon`` does with the matrices of a step."""
    gate = torch.ones((), device="cuda")
    updates = MatrixUpdates(members, nesterov=True, scale="match_rms_adamw", gate=gate)
    for indices, results in newton_schulz.each_round(updates.like, updates.load):
        updates.apply(indices, results)


def _members(number: int) -> list[Any]:
    """Matrices of two sizes with equal short sides: a round, in two stacks."""
    group = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    found: list[Any] = []
    for index in range(number):
        plan = SimpleNamespace(name=f"{index}", matrix_view=None, split_rows=())
        weight, gradient, buffer = (torch.randn(128, (384, 512)[index % 2], device="cuda") for _ in range(3))
        found.append((SimpleNamespace(plan=plan, master=weight, gradient=gradient), buffer, group))
    return found


def test_launches_of_an_update_do_not_grow_with_its_matrices() -> None:
    """Captured and replayed: a copy of a table is a launch too, but one for all matrices."""
    found: dict[int, Counter[str]] = {}
    for number in (4, 40):
        members, ns = _members(number), NewtonSchulz(kernel="cublas")
        for _ in range(3):
            _update(members, ns)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            _update(members, ns)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found[number] = Counter(_launched(lambda members=members, ns=ns: _update(members, ns)))
        own = {name: times for name, times in found[number].items() if name.startswith("_")}
        assert own == {"_momentum": 1, "_partials": 1, "_divide": 1, "_apply_change": 1, "_add_identity": 2}, own
    few, many = (counts.total() for counts in found.values())
    assert many <= few + 8, (found[4], found[40])  # cuBLAS may cut a product along its inner dim, in a second launch


def test_a_round_at_once_is_matrix_by_matrix() -> None:
    """The passes of one launch for all do the bits of a launch for each."""
    together = _members(6)
    apart = copy.deepcopy(together)
    gate = torch.ones((), device="cuda")
    ahead = momentum_updates([m for _, m, _ in together], [p.gradient for p, _, _ in together], 0.9, True, gate)
    stacks = [torch.empty(1, *x.shape, dtype=torch.float16, device="cuda") for x in ahead]
    normalize_into(ahead, stacks)
    apply_changes([p.master for p, _, _ in together], ahead, [0.5] * 6, 0.1, 0.01, gate)
    for (piece, buffer, _), (other, momentum, _), matrix, stack in zip(together, apart, ahead, stacks, strict=True):
        [one] = momentum_updates([momentum], [other.gradient], 0.9, True, gate)
        alone = torch.empty_like(stack)
        normalize_into([one], [alone])
        apply_changes([other.master], [one], [0.5], 0.1, 0.01, gate)
        pairs = ((buffer, momentum), (matrix, one), (stack, alone), (piece.master, other.master))
        assert all(torch.equal(x, y) for x, y in pairs)


def _tensors(state: torch.dtype) -> AdamWTensors:
    return AdamWTensors(
        [_random(size) for size in SIZES],
        [_random(size) for size in SIZES],
        [_random(size, state) for size in SIZES],
        [_random(size, state).abs() for size in SIZES],
        [torch.full((), float(number), device="cuda") for number, _ in enumerate(SIZES)],
    )


def _copy(tensors: AdamWTensors) -> AdamWTensors:
    columns = (tensors.weights, tensors.gradients, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.steps)
    return AdamWTensors(*([x.clone() for x in column] for column in columns))


@pytest.mark.parametrize("state", DTYPES, ids=str)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)], ids=str)
def test_adamw(state: torch.dtype, betas: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    settings = AdamWSettings(3e-3, betas, 1e-8, 0.1)
    start = [_tensors(state) for _ in _gates()]
    mine, plain = [_copy(t) for t in start], [_copy(t) for t in start]
    found = [adamw_update(t, settings, gate) for t, gate in zip(mine, _gates(), strict=True)]
    _plain(monkeypatch)
    expected = [adamw_update(t, settings, gate) for t, gate in zip(plain, _gates(), strict=True)]
    for begin, ours, theirs, squares, others in zip(start, mine, plain, found, expected, strict=True):
        for name in ("exp_avgs", "exp_avg_sqs", "steps"):
            for one, other in zip(getattr(ours, name), getattr(theirs, name), strict=True):
                _close(one, other, torch.float32 if name == "steps" else state)
        for before, one, other in zip(begin.weights, ours.weights, theirs.weights, strict=True):
            if state == torch.float32:
                _close(one, other, state)
            else:  # a rounded state moves the change by as much, not the weight
                torch.testing.assert_close(one - before, other - before, rtol=TOLERANCE[state], atol=settings.lr / 50)
        for one, other in zip(squares, others, strict=True):
            torch.testing.assert_close(
                one.double().sum(), other, rtol=TOLERANCE[state] if state == torch.bfloat16 else 1e-5, atol=0
            )
    for name in ("weights", "exp_avgs", "exp_avg_sqs", "steps"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(mine[2], name), getattr(start[2], name), strict=True))


def test_bias_correction_of_a_first_step_is_exact() -> None:
    """With one gradient the change is -lr sign(g), whatever beta2: 1 - 0.9999 in single precision would be off."""
    weight, gradient = torch.zeros(5000, device="cuda"), _random(5000, offset=0)
    state = [torch.zeros(5000, device="cuda") for _ in range(2)]
    tensors = AdamWTensors([weight], [gradient], [state[0]], [state[1]], [torch.zeros((), device="cuda")])
    adamw_update(tensors, AdamWSettings(1.0, (0.9, 0.9999), 0.0, 0.0), None)
    torch.testing.assert_close(weight, -gradient.sign(), rtol=1e-6, atol=0)


def test_a_closed_gate_keeps_nan_out() -> None:
    gate, nan = torch.zeros((), device="cuda"), torch.full((5000,), math.nan, device="cuda")
    tensors = _tensors(torch.float32)
    kept = _copy(tensors)
    for gradient in tensors.gradients:
        gradient.fill_(math.nan)
    adamw_update(tensors, AdamWSettings(1e-3, (0.9, 0.99), 1e-8, 0.1), gate)
    assert all(torch.equal(a, b) for a, b in zip(tensors.weights, kept.weights, strict=True))
    weight = torch.ones(5000, device="cuda")
    assert apply_changes([weight], [nan], [1.0], 1.0, 0.1, gate)[0].sum() == 0
    buffer = torch.ones(5000, device="cuda")
    assert torch.isfinite(momentum_updates([buffer], [nan], 0.9, True, gate)[0]).all()
    assert torch.equal(weight, torch.ones_like(weight)) and torch.equal(buffer, torch.ones_like(buffer))


def test_a_rate_on_the_device_takes_the_plain_passes() -> None:
    torch.manual_seed(3)
    ours = _tensors(torch.float32)
    theirs = _copy(ours)
    adamw_update(ours, AdamWSettings(torch.tensor(3e-3, device="cuda"), (0.9, 0.99), 1e-8, 0.1), None)
    adamw_update(theirs, AdamWSettings(3e-3, (0.9, 0.99), 1e-8, 0.1), None)
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        _close(one, other, torch.float32)
