"""Tensors in arbitrary inputs and outputs: nested sequences, mappings, dataclasses and plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Set
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

__all__ = ["cast_floating", "iterate_tensors", "map_tensors"]

T = TypeVar("T")
_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, nn.Module)


def iterate_tensors(value: object, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor inside ``value`` once, however it is nested."""
    seen = set() if _seen is None else _seen
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for child in _children(value):
        yield from iterate_tensors(child, seen)


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, Set)):
        return list(value)
    if isinstance(value, type) or callable(value):
        return []
    slots = [getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *slots]


def cast_floating(value: T, dtype: torch.dtype) -> T:
    """Return ``value`` with every floating tensor in it cast to ``dtype``; containers keep their types."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return ``value`` with ``change`` of each tensor in sequences, mappings and dataclasses; they keep their types."""
    return cast(T, _map(value, change))


def _map(value: object, change: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [_map(item, change) for item in value]
        kind = cast(Callable[..., object], type(value))
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, list):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = _map(item, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed_object = copy.copy(value)
        for entry in dataclasses.fields(value):
            object.__setattr__(changed_object, entry.name, _map(getattr(value, entry.name), change))
        return changed_object
    return value
