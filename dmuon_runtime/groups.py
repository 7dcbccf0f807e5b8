"""Optimizer groups: one for each route, or each group of the caller split by route, each with its own learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from dmuon_runtime.errors import ParamGroupError
from dmuon_runtime.guests import Guest
from dmuon_runtime.policy import ROUTES, Route
from dmuon_runtime.runtime import Runtime

__all__ = ["GroupDefaults", "build_groups"]


@dataclass(frozen=True)
class GroupDefaults:
    """Hyper-parameters given to the optimizer's constructor."""

    lr: float
    momentum: float
    weight_decay: float
    adamw_lr: float
    adamw_betas: tuple[float, float]
    adamw_eps: float
    adamw_weight_decay: float


_KNOWN = {
    "params", "name", "group_name", "lr", "weight_decay", "momentum", "betas", "eps", "muon_lr", "muon_weight_decay",
    "adamw_lr", "adamw_weight_decay", "adamw_betas",
}  # fmt: skip


def build_groups(
    runtime: Runtime,
    groups: Sequence[Mapping[str, object]] | None,
    defaults: GroupDefaults,
    guests: Sequence[Guest] = (),
) -> list[dict[str, object]]:
    """Return torch param groups with ``route``, ``group_name`` and hyper-parameters, the same on all ranks.

    Raises :class:`ParamGroupError` that lists unknown keys, foreign tensors, duplicates and omissions, all at once.
    """
    if groups is None:
        groups = [{"params": [*runtime.parameters, *(guest.parameter for guest in guests)], "name": "default"}]
    members = _check(_Roll.call(runtime, guests), groups)
    managers = {id(guest.parameter): guest.manager for guest in guests}
    built: list[dict[str, object]] = []
    for index, (group, parameters) in enumerate(zip(groups, members, strict=True)):
        name = str(group.get("group_name", group.get("name", f"group_{index}")))
        for route in ROUTES:
            chosen = [runtime.parameters[i] for i in parameters if runtime.plan.parameters[i].route == route]
            if chosen:
                built.append({"params": chosen, "route": route, "group_name": f"{name}/{route}"})
                built[-1].update(_settings(group, route, defaults))
        for manager in dict.fromkeys(managers.values()):
            visiting = [p for p in _listed(group) if managers.get(id(p)) == manager]
            if visiting:
                built.append(
                    {"params": visiting, "route": "adamw", "group_name": f"{name}/adamw/{manager}", "manager": manager}
                )
                built[-1].update(_settings(group, "adamw", defaults))
    return built


@dataclass(frozen=True)
class _Roll:
    """Whom groups must name: by the id of a parameter that is alive, its place; names by place."""

    places: dict[int, int]
    names: list[str]
    num_own: int

    @classmethod
    def call(cls, runtime: Runtime, guests: Sequence[Guest]) -> _Roll:
        """Return own parameters in plan order, then guests."""
        everyone = [*runtime.parameters, *(guest.parameter for guest in guests)]
        names = [entry.name for entry in runtime.plan.parameters] + [guest.name for guest in guests]
        return cls({id(parameter): place for place, parameter in enumerate(everyone)}, names, len(runtime.parameters))


def _listed(group: Mapping[str, object]) -> list[object]:
    given = group.get("params")
    return [given] if isinstance(given, nn.Parameter) else list(cast("Sequence[object]", given))


def _settings(group: Mapping[str, object], route: Route, defaults: GroupDefaults) -> dict[str, object]:
    if route == "muon":
        return {
            "lr": group.get("muon_lr", group.get("lr", defaults.lr)),
            "weight_decay": group.get("muon_weight_decay", group.get("weight_decay", defaults.weight_decay)),
            "momentum": group.get("momentum", defaults.momentum),
        }
    return {
        "lr": group.get("adamw_lr", group.get("lr", defaults.adamw_lr)),
        "weight_decay": group.get("adamw_weight_decay", group.get("weight_decay", defaults.adamw_weight_decay)),
        "betas": group.get("adamw_betas", group.get("betas", defaults.adamw_betas)),
        "eps": group.get("eps", defaults.adamw_eps),
    }


def _check(roll: _Roll, groups: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """Return plan indices of each group's members; frozen members and guests are left out."""
    if isinstance(groups, Mapping) or not groups:
        raise ParamGroupError("param_groups must be a non-empty list of mappings with 'params'")
    mistakes: list[str] = []
    seen: dict[int, int] = {}
    members: list[list[int]] = []
    for number, group in enumerate(groups):
        unknown = sorted(set(group) - _KNOWN)
        if unknown:
            mistakes.append(f"group {number} has the unknown keys {unknown}; known are {sorted(_KNOWN)}")
        members.append([i for i in _members(number, group, roll, seen, mistakes) if i < roll.num_own])
    omitted = [name for i, name in enumerate(roll.names) if i not in seen]
    if omitted:
        mistakes.append(f"no group has {', '.join(omitted)}; every managed parameter must be in one")
    if mistakes:
        raise ParamGroupError("param_groups is invalid: " + "; ".join(mistakes), mistakes)
    return members


def _members(
    number: int, group: Mapping[str, object], roll: _Roll, seen: dict[int, int], mistakes: list[str]
) -> list[int]:
    given = group.get("params")
    if isinstance(given, nn.Parameter):
        given = [given]
    if not isinstance(given, (list, tuple)):
        mistakes.append(f"group {number} has no list of parameters under 'params'")
        return []
    found: list[int] = []
    for position, parameter in enumerate(given):
        place = roll.places.get(id(parameter))
        if place is None:
            if not isinstance(parameter, nn.Parameter) or parameter.requires_grad:
                shape = f"of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else repr(parameter)
                mistakes.append(
                    f"group {number} has at position {position} a tensor {shape} that is no parameter of the model; "
                    "take parameters from the dedicated model, after fully_shard"
                )
        elif place in seen:
            mistakes.append(f"{roll.names[place]} is in group {seen[place]} and again in group {number}")
        else:
            seen[place] = number
            found.append(place)
    return found
