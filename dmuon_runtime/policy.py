"""What happens to each parameter: ``param_policy`` resolved field by field, and the rule that decided.

Order: field defaults, ``defaults``, then every matching override in list order. An override matches when any of its
tokens is a substring of the parameter's full name (of any of them, if a tensor is tied); without a selector it matches
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, cast, get_args

import torch
from torch import nn

from dmuon_runtime.errors import PolicyError, SettingError
from dmuon_runtime.matrices import MATRIX_VIEWS, MatrixView

__all__ = [
    "DTYPE_NAMES", "ROUTES", "Override", "ParamPolicy", "PolicyFields", "Route", "RouteHintFn", "dtype_name",
    "parse_param_policy", "parse_route", "resolve_policy",
]  # fmt: skip

Route = Literal["muon", "adamw", "sharded_adamw"]
ROUTES: tuple[Route, ...] = get_args(Route)
RouteHintFn = Callable[[str, nn.Parameter], "str | None"]

_ROUTE_ALIASES: Mapping[str, Route] = {
    "muon": "muon", "matrix": "muon", "matrix_optimizer": "muon",
    "adamw": "adamw", "base": "adamw", "base_adamw": "adamw", "base_optimizer": "adamw", "dedicated_adamw": "adamw",
    "sharded_adamw": "sharded_adamw", "sharded": "sharded_adamw", "base_sharded": "sharded_adamw",
    "sharded_collective": "sharded_adamw", "base_sharded_adamw": "sharded_adamw",
}  # fmt: skip
_DTYPE_ALIASES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32, "float32": torch.float32, "f32": torch.float32, "torch.float32": torch.float32,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "torch.bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16, "torch.float16": torch.float16,
    "fp64": torch.float64, "float64": torch.float64, "torch.float64": torch.float64,
}  # fmt: skip
DTYPE_NAMES: Mapping[str, torch.dtype] = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
}  # fmt: skip
_DTYPE_FIELDS = ("param_dtype", "grad_dtype", "output_dtype", "master_dtype", "optim_dtype")


@dataclass(frozen=True)
class PolicyFields:
    """The resolved policy of one parameter. ``None`` in a dtype keeps what the parameter or autograd already has."""

    route: Route = "muon"
    param_dtype: torch.dtype | None = None
    """Compute and forward communication dtype; None: the parameter's own."""
    grad_dtype: torch.dtype | None = None
    """Gradient communication dtype; None: the compute dtype."""
    output_dtype: torch.dtype | None = None
    """Floating outputs of the boundary are cast to it; None: left alone."""
    cast_forward_inputs: bool = False
    master_dtype: torch.dtype | None = torch.float32
    optim_dtype: torch.dtype | None = torch.float32
    matrix_view: MatrixView | None = None
    """How the tensor is read as [outputs, inputs]: see :mod:`dmuon_runtime.matrices`."""
    split_rows: tuple[int, ...] = ()
    """Outputs of each block that is a matrix of its own (queries, keys, values); empty: the matrix is one."""
    rule: str = "defaults"
    """What set the route: ``defaults``, ``overrides[i]`` or ``route_hint_fn``."""
    matched_overrides: tuple[int, ...] = ()


_SETTABLE = tuple(f.name for f in fields(PolicyFields) if f.name not in ("rule", "matched_overrides"))


@dataclass(frozen=True)
class Override:
    """One entry of ``overrides``: tokens to look for (empty: every name) and the fields it sets."""

    tokens: tuple[str, ...]
    changes: Mapping[str, object]

    def matches(self, names: Sequence[str]) -> bool:
        """Tell whether any token is a substring of any of ``names``, the names of one tensor."""
        return not self.tokens or any(token in name for token in self.tokens for name in names)


@dataclass(frozen=True)
class ParamPolicy:
    """A parsed ``param_policy``."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def parse_route(value: object) -> Route:
    """Return the route that ``value`` names; raises :class:`SettingError` for anything else."""
    if isinstance(value, str):
        route = _ROUTE_ALIASES.get(value.strip().lower())
        if route is not None:
            return route
    raise SettingError(f"unknown route {value!r}; use one of {', '.join(ROUTES)}")


def _parse_dtype(value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        if isinstance(value, torch.dtype) and value not in DTYPE_NAMES.values():
            raise SettingError(f"dtype {value} is not a floating dtype of {', '.join(DTYPE_NAMES)}")
        return value
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("", "none", "null"):
            return None
        if text in _DTYPE_ALIASES:
            return _DTYPE_ALIASES[text]
    raise SettingError(f"unknown dtype {value!r}; use one of {', '.join(DTYPE_NAMES)}")


def _parse_field(key: str, value: object) -> object:
    if key == "route":
        return "muon" if value is None else parse_route(value)
    if key in _DTYPE_FIELDS:
        return _parse_dtype(value)
    if key == "cast_forward_inputs":
        if isinstance(value, bool):
            return value
        raise SettingError(f"cast_forward_inputs must be true or false, not {value!r}")
    if key == "matrix_view":
        if value is None or value in MATRIX_VIEWS:
            return value
        raise SettingError(f"matrix_view must be one of {', '.join(MATRIX_VIEWS)}, not {value!r}")
    if value is None:
        return ()
    rows = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if rows and all(isinstance(row, int) and not isinstance(row, bool) and row > 0 for row in rows):
        return rows
    raise SettingError(f"split_rows must be a list of positive row counts, not {value!r}")


def _parse_fields(value: object, where: str, mistakes: list[str]) -> dict[str, object]:
    if not isinstance(value, Mapping):
        mistakes.append(f"{where} must be a mapping of policy fields, not {type(value).__name__}")
        return {}
    parsed: dict[str, object] = {}
    for key, item in value.items():
        if key not in _SETTABLE:
            mistakes.append(f"{where} has the unknown field {key!r}; fields are {', '.join(_SETTABLE)}")
            continue
        try:
            parsed[key] = _parse_field(key, item)
        except SettingError as error:
            mistakes.append(f"{where}.{key}: {error}")
    return parsed


def _parse_tokens(entry: Mapping[object, object], where: str, mistakes: list[str]) -> tuple[str, ...]:
    if "name" in entry and "contains" in entry:
        mistakes.append(f'{where} has both "name" and its old alias "contains"; keep "name"')
    value = entry.get("name", entry.get("contains"))
    if value is None:
        return ()
    tokens = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (value,)
    if not all(isinstance(token, str) for token in tokens):
        mistakes.append(f"{where}.name must be a text or a list of texts, not {value!r}")
        return ()
    return cast("tuple[str, ...]", tokens)


def _parse_override(entry: object, where: str, mistakes: list[str]) -> Override:
    if not isinstance(entry, Mapping):
        mistakes.append(f'{where} must be a mapping with "name" and "set", not {type(entry).__name__}')
        return Override((), {})
    unknown = [key for key in entry if key not in ("name", "contains", "set")]
    if unknown:
        mistakes.append(f'{where} has the unknown keys {unknown}; an override has "name" and "set"')
    if "set" not in entry:
        mistakes.append(f'{where} has no "set"')
    return Override(
        _parse_tokens(entry, where, mistakes), _parse_fields(entry.get("set", {}), f"{where}.set", mistakes)
    )


def parse_param_policy(value: Mapping[str, object] | None) -> ParamPolicy:
    """Return ``value`` checked and normalised; raises :class:`PolicyError` that lists every mistake in it."""
    if value is None:
        return ParamPolicy()
    mistakes: list[str] = []
    if not isinstance(value, Mapping):
        raise PolicyError(f"param_policy must be a mapping, not {type(value).__name__}")
    unknown = [str(key) for key in value if key not in ("defaults", "overrides")]
    if unknown:
        mistakes.append(f'unknown keys {unknown}; param_policy has "defaults" and "overrides"')
    defaults = _parse_fields(value.get("defaults", {}), "defaults", mistakes)
    entries = value.get("overrides") or ()
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        mistakes.append(f"overrides must be a list, not {type(entries).__name__}")
        entries = ()
    overrides = tuple(_parse_override(entry, f"overrides[{i}]", mistakes) for i, entry in enumerate(entries))
    if mistakes:
        raise PolicyError("param_policy is invalid: " + "; ".join(mistakes), mistakes)
    return ParamPolicy(defaults, overrides)


def _apply(policy: PolicyFields, changes: Mapping[str, object]) -> PolicyFields:
    return replace(policy, **changes)  # type: ignore[arg-type]  # each value was parsed by its field


def resolve_policy(
    names: Sequence[str], parameter: nn.Parameter, policy: ParamPolicy, route_hint_fn: RouteHintFn | None
) -> PolicyFields:
    """Return the policy of a parameter and the rule that gave it its route; a tied one has several ``names``."""
    resolved = _apply(PolicyFields(), policy.defaults)
    if route_hint_fn is not None:
        hint = route_hint_fn(names[0], parameter)
        if hint is not None:
            try:
                resolved = replace(resolved, route=parse_route(hint), rule="route_hint_fn")
            except SettingError as error:
                raise PolicyError(f"route_hint_fn({names[0]!r}): {error}", names) from None
    for index, override in enumerate(policy.overrides):
        if override.matches(names):
            resolved = _apply(resolved, override.changes)
            matched = (*resolved.matched_overrides, index)
            rule = f"overrides[{index}]" if "route" in override.changes else resolved.rule
            resolved = replace(resolved, matched_overrides=matched, rule=rule)
    return resolved
