"""Optimizer state by fully qualified name, whole tensors: momentum, moments, step counts and group settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from dmuon_runtime.errors import StateMismatch
from dmuon_runtime.muon import Muon
from dmuon_runtime.runtime import find_runtime, inner_model
from dmuon_runtime.schedule import Call
from dmuon_runtime.shards import WEIGHT, StatePart, load_state_parts, state_layout, state_parts

__all__ = ["OptimizerState", "get_optimizer_state_dict", "set_optimizer_state_dict"]


class OptimizerState(TypedDict):
    """What :func:`get_optimizer_state_dict` returns."""

    state: dict[str, dict[str, Tensor]]
    """By parameter and kind; ``step`` is 0-dim, the others have the parameter's shape, in ``optim_dtype``."""
    param_groups: list[dict[str, Any]]
    """Settings of each group by ``group_name``; ``params`` are names."""


@torch.no_grad()
def get_optimizer_state_dict(model: nn.Module, optimizer: Muon) -> OptimizerState:
    """Return copies of the whole state, the same on every rank; collective.

    Parameters are named as in ``model.state_dict()``, a tied one by its first name.
    """
    runtime = find_runtime(model)
    runtime.watch.note_outside()
    runtime.schedule.meet(Call.SAVE)
    mine: dict[tuple[str, str], list[StatePart]] = {}
    for part in state_parts(model, optimizer):
        if part.kind != WEIGHT and part.is_source:
            mine.setdefault((part.name, part.kind), []).append(part)
    state: dict[str, dict[str, Tensor]] = {}
    for kind, names, shape, dtype in _entries(model, optimizer):
        whole = torch.zeros(max(1, shape.numel()), dtype=dtype, device=runtime.transport.device)
        for part in mine.get((names[0], kind), ()):
            whole[part.start : part.stop] = part.values()
        runtime.transport.sum_values(whole.view(torch.uint8))  # as bytes: -0.0 and NaN stay what they are
        state.setdefault(names[0], {})[kind] = whole[: shape.numel()].view(shape)
    return {"state": state, "param_groups": _groups(model, optimizer)}


@torch.no_grad()
def set_optimizer_state_dict(model: nn.Module, optimizer: Muon, state: OptimizerState) -> None:
    """Load whole tensors and group settings by name; collective, with the same ``state`` on every rank.

    Raises :class:`StateMismatch` on all ranks, before anything is changed, with everything that is missing, unexpected,
    of another shape or dtype, or in another group.
    """
    runtime = find_runtime(model)
    runtime.watch.note_outside()
    runtime.schedule.meet(Call.LOAD)
    mistakes = _mistakes(model, optimizer, state)
    everywhere = [json.loads(text) for text in runtime.transport.gather_texts(json.dumps(mistakes))]
    if any(everywhere):
        lines = [f"rank {rank}: {line}" for rank, found in enumerate(everywhere) for line in found]
        raise StateMismatch("the optimizer state does not fit, nothing was loaded: " + "; ".join(lines), lines)

    def read(part: StatePart) -> Tensor | None:
        if part.kind == WEIGHT:
            return None
        whole = state["state"][_known(part.names, state)][part.kind]
        return whole.reshape(-1)[part.start : part.stop]

    load_state_parts(model, optimizer, read)
    by_name = {group["group_name"]: group for group in state["param_groups"]}
    for group in optimizer.param_groups:
        group.update({key: value for key, value in by_name[group["group_name"]].items() if key != "params"})


def _entries(model: nn.Module, optimizer: Muon) -> Iterator[tuple[str, tuple[str, ...], torch.Size, torch.dtype]]:
    for entry in state_layout(model, optimizer):
        if entry.kind != WEIGHT:
            yield entry.kind, entry.names, torch.Size(entry.shape), entry.dtype


def _names_by_id(model: nn.Module) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in inner_model(model).named_parameters(remove_duplicate=False):
        names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return names


def _groups(model: nn.Module, optimizer: Muon) -> list[dict[str, Any]]:
    names = _names_by_id(model)
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[id(parameter)][0] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _known(names: tuple[str, ...], state: OptimizerState) -> str:
    """Return the name under which ``state`` has a tensor: another than the first where it is tied."""
    return next((name for name in names if name in state["state"]), names[0])


def _mistakes(model: nn.Module, optimizer: Muon, state: OptimizerState) -> list[str]:
    found: list[str] = []
    expected: dict[str, set[str]] = {}
    for kind, names, shape, dtype in _entries(model, optimizer):
        name = _known(names, state)
        expected.setdefault(name, set()).add(kind)
        value = state["state"].get(name, {}).get(kind)
        if value is None:
            found.append(f"missing {kind} of {name}")
        elif value.shape != shape:
            found.append(f"{kind} of {name} has shape {tuple(value.shape)}, the optimizer's {tuple(shape)}")
        elif value.dtype != dtype:
            found.append(f"{kind} of {name} has dtype {value.dtype}, the optimizer's {dtype}")
    for name, kinds in state["state"].items():
        found += [f"unexpected {kind} of {name}" for kind in kinds if kind not in expected.get(name, ())]
    return found + _group_mistakes(_groups(model, optimizer), state)


def _group_mistakes(groups: list[dict[str, Any]], state: Mapping[str, Any]) -> list[str]:
    ours = {str(group["group_name"]): group["route"] for group in groups}
    theirs = {str(group["group_name"]): group["route"] for group in state["param_groups"]}
    found = [f"missing group {name}" for name in ours if name not in theirs]
    found += [f"unexpected group {name}" for name in theirs if name not in ours]
    return found + [
        f"group {name} has route {theirs[name]}, the optimizer's {route}"
        for name, route in ours.items()
        if theirs.get(name, route) != route
    ]
