"""Optimizer groups: one for each route, or each group of the caller split by route, each with its own learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from dmuon_runtime.errors import ParamGroupError, SettingError
from dmuon_runtime.plan import ParameterPlan
from dmuon_runtime.policy import ROUTES, Route, parse_route
from dmuon_runtime.runtime import Runtime

__all__ = ["GroupDefaults", "build_groups", "learning_rate"]


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
    "adamw_lr", "adamw_weight_decay", "adamw_betas", *_ROUTE_KEYS,
}  # fmt: skip


def build_groups(
    runtime: Runtime, groups: Sequence[Mapping[str, object]] | None, defaults: GroupDefaults
) -> list[dict[str, object]]:
    """Return torch param groups with ``route``, ``group_name`` and hyper-parameters, the same on all ranks.

    A group may change the maths of its members (``muon`` to ``adamw`` or back), not their placement. Raises
    :class:`ParamGroupError` that lists unknown keys, foreign tensors, duplicates, omissions and routes that cannot be.
    """
    if groups is None:
        groups = [{"params": list(runtime.parameters), "name": "default"}]
    members = _check(runtime, groups)
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
    return built


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
        "eps": group.get("eps", defaults.adamw_eps),
    }


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


def _check(runtime: Runtime, groups: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """Return plan indices of each group's members; frozen members are left out."""
    if isinstance(groups, Mapping) or not groups:
        raise ParamGroupError("param_groups must be a non-empty list of mappings with 'params'")
    index = {id(parameter): i for i, parameter in enumerate(runtime.parameters)}
    mistakes: list[str] = []
    seen: dict[int, int] = {}
    members: list[list[int]] = []
    for number, group in enumerate(groups):
        unknown = sorted(set(group) - _KNOWN)
        if unknown:
            mistakes.append(f"group {number} has the unknown keys {unknown}; known are {sorted(_KNOWN)}")
        members.append(_members(number, group, index, runtime, seen, mistakes))
        mistakes += _route_mistakes(number, group, [runtime.plan.parameters[i] for i in members[-1]])
    omitted = [entry.name for i, entry in enumerate(runtime.plan.parameters) if i not in seen]
    if omitted:
        mistakes.append(f"no group has {', '.join(omitted)}; every managed parameter must be in one")
    if mistakes:
        raise ParamGroupError("param_groups is invalid: " + "; ".join(mistakes), mistakes)
    return members


def _members(
    number: int,
    group: Mapping[str, object],
    index: Mapping[int, int],
    runtime: Runtime,
    seen: dict[int, int],
    mistakes: list[str],
) -> list[int]:
    given = group.get("params")
    if isinstance(given, nn.Parameter):
        given = [given]
    if not isinstance(given, (list, tuple)):
        mistakes.append(f"group {number} has no list of parameters under 'params'")
        return []
    found: list[int] = []
    for parameter in given:
        place = index.get(id(parameter))
        if place is None:
            if not isinstance(parameter, nn.Parameter) or parameter.requires_grad:
                mistakes.append(f"group {number} has a tensor that the runtime does not manage")
        elif place in seen:
            name = runtime.plan.parameters[place].name
            mistakes.append(f"{name} is in group {seen[place]} and again in group {number}")
        else:
            seen[place] = number
            found.append(place)
    return found
