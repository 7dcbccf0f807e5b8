"""Optimizer groups: one for each route, or each group of the caller split by route, each with its own learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from dmuon_runtime.errors import ParamGroupError, SettingError
from dmuon_runtime.guests import Guest
from dmuon_runtime.plan import ParameterPlan
from dmuon_runtime.policy import ROUTES, Route, parse_route
from dmuon_runtime.runtime import Runtime

__all__ = ["GroupDefaults", "as_number", "build_groups", "check_numbers", "learning_rate"]


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


_ROUTE_KEYS = ("dmuon_route", "dmuon_optimizer", "matrix_optimizer")
"""Keys of a group that put all of its members on one route; the first that is there counts."""
_KNOWN = {
    "params", "name", "group_name", "lr", "weight_decay", "momentum", "betas", "eps", "muon_lr", "muon_weight_decay",
    "adamw_lr", "adamw_weight_decay", "adamw_betas", "adamw_eps", *_ROUTE_KEYS,
}  # fmt: skip


def build_groups(
    runtime: Runtime,
    groups: Sequence[Mapping[str, object]] | None,
    defaults: GroupDefaults,
    guests: Sequence[Guest] = (),
) -> list[dict[str, object]]:
    """Return torch param groups with ``route``, ``group_name`` and hyper-parameters, the same on all ranks.

    A group may change the maths of its members (``muon`` to ``adamw`` or back), not their placement. Raises
    :class:`ParamGroupError` that lists unknown keys, foreign tensors, duplicates, omissions and routes that cannot be.
    """
    if groups is None:
        groups = [{"params": [*runtime.parameters, *(guest.parameter for guest in guests)], "name": "default"}]
    members = _check(_Roll.call(runtime, guests), groups)
    managers = {id(guest.parameter): guest.manager for guest in guests}
    built: list[dict[str, object]] = []
    for index, (group, parameters) in enumerate(zip(groups, members, strict=True)):
        name = str(group.get("group_name", group.get("name", f"group_{index}")))
        forced = _forced_route(group)
        for route in ROUTES:
            chosen = [
                runtime.parameters[i] for i in parameters if (forced or runtime.plan.parameters[i].route) == route
            ]
            if chosen:
                built.append(
                    {"params": chosen, "route": route, "group_name": f"{name}/{route}", "semantic_group_name": name}
                )
                built[-1].update(_settings(group, route, defaults))
                rate = built[-1]["lr"]
                built[-1]["lr"] = rate.clone() if isinstance(rate, Tensor) else rate  # schedulers fill it in place
        for manager in dict.fromkeys(managers.values()):
            visiting = [p for p in _listed(group) if managers.get(id(p)) == manager]
            if visiting:
                built.append(
                    {"params": visiting, "route": "adamw", "group_name": f"{name}/adamw/{manager}", "manager": manager}
                )
                built[-1].update(_settings(group, "adamw", defaults))
                rate = built[-1]["lr"]
                built[-1]["lr"] = rate.clone() if isinstance(rate, Tensor) else rate  # schedulers fill it in place
    return built


@dataclass(frozen=True)
class _Roll:
    """Whom groups must name: by the id of a parameter that is alive, its place; names by place."""

    places: dict[int, int]
    names: list[str]
    plans: tuple[ParameterPlan, ...]
    """Of the runtime's own, which come first."""

    @property
    def num_own(self) -> int:
        """Parameters of the runtime itself."""
        return len(self.plans)

    @classmethod
    def call(cls, runtime: Runtime, guests: Sequence[Guest]) -> _Roll:
        """Return own parameters in plan order, then guests."""
        everyone = [*runtime.parameters, *(guest.parameter for guest in guests)]
        names = [entry.name for entry in runtime.plan.parameters] + [guest.name for guest in guests]
        return cls({id(parameter): place for place, parameter in enumerate(everyone)}, names, runtime.plan.parameters)


def _listed(group: Mapping[str, object]) -> list[object]:
    given = group.get("params")
    return [given] if isinstance(given, nn.Parameter) else list(cast("Sequence[object]", given))


def learning_rate(group: Mapping[str, object]) -> float | Tensor:
    """Return a group's rate as it is now, whatever was assigned: a number, or a 0-dim tensor if it is on a device.

    A tensor in host memory is read here; one on a device is used there, which no step waits for.
    """
    value = group["lr"]
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach()
    return float(cast(float, value))


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
        "eps": group.get("adamw_eps", group.get("eps", defaults.adamw_eps)),
    }


def check_numbers(groups: Sequence[Mapping[str, object]]) -> None:
    """Raise :class:`SettingError` with every hyper-parameter of built groups that no update could use."""
    mistakes = [
        f"{group['group_name']}: {key} must be finite and not negative, not {group[key]!r}"
        for group in groups
        for key in ("lr", "weight_decay", "momentum", "eps")
        if key in group and not 0.0 <= as_number(group[key]) < math.inf
    ]
    mistakes += [
        f"{group['group_name']}: betas must be two numbers, each at least 0 and below 1, not {group['betas']!r}"
        for group in groups
        if "betas" in group and not _are_betas(group["betas"])
    ]
    if mistakes:
        raise SettingError("; ".join(mistakes), mistakes)


def as_number(value: object) -> float:
    """Return a number, or the only one in a tensor; NaN, which no check lets pass, for anything else."""
    if isinstance(value, (bool, str, bytes)):
        return math.nan
    try:
        return float(cast(float, value))
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _are_betas(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(0.0 <= as_number(beta) < 1.0 for beta in value)


def _forced_route(group: Mapping[str, object]) -> Route | None:
    """Return the route that the group puts all of its members on, or None; raises :class:`SettingError`."""
    key = next((key for key in _ROUTE_KEYS if key in group), None)
    return None if key is None else parse_route(group[key])


def _route_mistakes(number: int, group: Mapping[str, object], members: Sequence[ParameterPlan]) -> list[str]:
    """Say which members cannot take the route that the group forces on them."""
    try:
        forced = _forced_route(group)
    except SettingError as error:
        return [f"group {number}: {error}"]
    found: list[str] = []
    for entry in members:
        if forced is None or forced == entry.route:
            continue
        if "sharded_adamw" in (forced, entry.route):
            found.append(
                f"group {number} moves {entry.name} from {entry.route} to {forced}, but shards are laid out by "
                "dedicate_params; set the route in param_policy"
            )
        elif forced == "muon" and not _is_matrix(entry):
            found.append(
                f"group {number} moves {entry.name} to muon, but its shape {entry.shape} is no plain matrix; leave it "
                "out of the group, or set route and matrix_view in param_policy"
            )
    return found


def _is_matrix(entry: ParameterPlan) -> bool:
    return len(entry.shape) == 2 and min(entry.shape) > 1


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
        mistakes += _route_mistakes(number, group, [roll.plans[i] for i in members[-1]])
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
                what = (
                    f"a tensor of shape {tuple(parameter.shape)}"
                    if isinstance(parameter, Tensor)
                    else f"a {type(parameter).__name__}"
                )
                mistakes.append(
                    f"group {number} has at position {position} {what} that is no parameter of the model; "
                    "take parameters from the dedicated model, after fully_shard"
                )
        elif place in seen:
            mistakes.append(f"{roll.names[place]} is in group {seen[place]} and again in group {number}")
        else:
            seen[place] = number
            found.append(place)
    return found
