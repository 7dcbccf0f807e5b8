"""The Muon route's part of a step, round by round: the same bits as all at once, in less memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dmuon_runtime._ns_groups import Group
from dmuon_runtime.breaker import Thresholds
from dmuon_runtime.guard import KernelGuard, guarded_orthogonalize
from dmuon_runtime.matrix_updates import MatrixUpdates
from dmuon_runtime.newton_schulz import NewtonSchulz
from dmuon_runtime.transport import Transport

MODULE = sys.modules["dmuon_runtime.newton_schulz"]  # the package's attribute of this name is the function
SHAPES = {"a": (12, 8), "b": (8, 12), "fused": (20, 8), "c": (12, 8), "none": (0, 8), "d": (8, 8)}
SPLITS = {"fused": (12, 8)}
GROUP = {"lr": 0.02, "initial_lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


def _members(seed: int = 0) -> list[tuple[Any, Tensor, dict[str, object]]]:
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[Any, Tensor, dict[str, object]]] = []
    for name, shape in SHAPES.items():
        weight, gradient, buffer = (torch.randn(shape, generator=generator) for _ in range(3))
        plan = SimpleNamespace(name=name, matrix_view=None, split_rows=SPLITS.get(name, ()))
        found.append((SimpleNamespace(plan=plan, master=weight, gradient=gradient), buffer, dict(GROUP)))
    return found


def _updates(members: Sequence[Any], gate: Tensor | None = None) -> MatrixUpdates:
    return MatrixUpdates(members, nesterov=True, scale="match_rms_adamw", gate=gate)


def _cut_by_one(group: Group, members: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[member] for member in members]


def _watched(updates: MatrixUpdates) -> tuple[Callable[[Sequence[int]], list[Tensor]], list[weakref.ref[Tensor]]]:
    """Return a ``load`` that allows one round to be held at most, and what it has given out."""
    seen: list[weakref.ref[Tensor]] = []

    def load(indices: Sequence[int]) -> list[Tensor]:
        assert sum(ref() is not None for ref in seen) <= 1, "the round before has been let go"
        matrices = updates.load(indices)
        seen.extend(weakref.ref(matrix) for matrix in matrices)
        return matrices

    return load, seen


@pytest.mark.parametrize("gate", [None, 1.0, 0.0])
def test_rounds_are_all_at_once_bit_by_bit(gate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter whose blocks lie in different rounds changes once, when the last of them has come back."""
    ns, closed = NewtonSchulz(kernel="cublas"), None if gate is None else torch.tensor(gate)
    monkeypatch.setattr(MODULE, "rounds", _cut_by_one)
    whole, cut = _members(), _members()
    at_once, by_rounds = _updates(whole, closed), _updates(cut, closed)
    everything = range(len(at_once.like))
    at_once.apply(everything, ns.orthogonalize(at_once.load(everything)))
    asked = []
    for indices, results in ns.each_round(by_rounds.like, by_rounds.load):
        asked.append(len(indices))
        by_rounds.apply(indices, results)
    assert asked == [1] * len(everything) and len(everything) == len(SHAPES) + 1
    for one, other, start in zip(whole, cut, _members(), strict=True):
        assert torch.equal(one[0].master, other[0].master) and torch.equal(one[1], other[1])
        assert torch.equal(one[0].master, start[0].master) == (gate == 0.0 or one[0].master.numel() == 0)
    assert all(torch.equal(a, b) for a, b in zip(at_once.squares, by_rounds.squares, strict=True))
    assert by_rounds.orthogonalized == at_once.orthogonalized == dict.fromkeys(SHAPES, 1) | {"fused": 2}


def test_no_more_than_a_round_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "rounds", _cut_by_one)
    updates = _updates([member for member in _members() if member[0].plan.name != "fused"])
    load, seen = _watched(updates)
    for indices, results in NewtonSchulz(kernel="cublas").each_round(updates.like, load):
        updates.apply(indices, results)
        del results
    assert len(seen) == len(updates.like) and all(ref() is None for ref in seen)


@pytest.mark.parametrize("gate", [None, 1.0, 0.0])
@pytest.mark.parametrize("nesterov", [True, False])
def test_what_is_asked_for_again_is_made_anew_without_moving_the_momentum(gate: float | None, nesterov: bool) -> None:
    """A step that the fallback does once more; with a closed gate a gradient may be no number."""
    members = _members()
    updates = MatrixUpdates(
        members, nesterov=nesterov, scale="original", gate=None if gate is None else torch.tensor(gate)
    )
    if gate == 0.0:
        members[0][0].gradient.fill_(torch.nan)
    everything = range(len(updates.like))
    first = [matrix.clone() for matrix in updates.load(everything)]
    moved = [buffer.clone() for _, buffer, _ in members]
    again = updates.load(everything)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert all(torch.equal(buffer, before) for (_, buffer, _), before in zip(members, moved, strict=True))


def test_a_guarded_step_holds_no_more_than_a_round_of_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "rounds", _cut_by_one)
    updates = _updates([member for member in _members() if member[0].plan.name != "fused"])
    load, seen = _watched(updates)
    ns = NewtonSchulz(kernel="blocked")
    ns.guard = KernelGuard(Thresholds(check_every_calls=1))
    told = SimpleNamespace(agree_max=lambda values: values, device=torch.device("cpu"))
    results, good = guarded_orthogonalize(ns, cast(Transport, told), updates.like, load, 5)
    assert good is None and len(results) == len(updates.like) == len(seen)
