"""Every tensor is found, however it is nested, and casts keep containers what they are."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmuon_runtime.trees import cast_floating, iterate_tensors


class Pair(NamedTuple):
    """A named tuple."""

    first: Tensor
    second: int


@dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    value: Tensor
    inner: dict[str, list[Tensor]]


class Slotted:
    """An object without ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_tensors_are_found_once() -> None:
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    loop: list[object] = [a]
    loop.append(loop)
    nested = {"x": Frozen(b, {"k": [a, c]}), "y": (Pair(d, 3), "text", None), "z": [Slotted(a)], "loop": loop}
    found = list(iterate_tensors(nested))
    assert {id(t) for t in found} == {id(t) for t in (a, b, c, d)}
    assert len(found) == 4


def test_casts_keep_containers() -> None:
    value = OrderedDict(a=Pair(torch.zeros(2), 3), b=[torch.arange(2)], c=Frozen(torch.zeros(1), {}))
    cast = cast_floating(value, torch.bfloat16)
    assert type(cast) is OrderedDict and type(cast["a"]) is Pair and type(cast["c"]) is Frozen
    assert cast["a"].first.dtype is torch.bfloat16  # type: ignore[attr-defined]
    assert cast["b"][0].dtype is torch.int64  # type: ignore[index]
    assert cast["c"].value.dtype is torch.bfloat16  # type: ignore[attr-defined]
    assert value["a"].first.dtype is torch.float32  # type: ignore[attr-defined]
