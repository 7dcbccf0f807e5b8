"""Which matrices a parameter holds: the one place that reads ``matrix_view`` and ``split_rows``.

Shapes: a parameter is [rows, columns], or has more dims and a view: ``flatten`` reads [dim 0, rest], ``experts`` keeps
all but the last two dims as a batch. ``split_rows`` cuts the rows of each matrix into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MatrixShape", "matrix_blocks", "matrix_shapes"]


@dataclass(frozen=True)
class MatrixShape:
    """``count`` equal matrices of ``rows`` by ``columns``."""

    count: int
    rows: int
    columns: int


def _as_batch(shape: Sequence[int], view: str | None) -> tuple[int, ...]:
    if len(shape) == 2:
        return tuple(shape)
    if view == "experts" and len(shape) > 2:
        return tuple(shape)
    first = shape[0] if shape else 1
    return (first, math.prod(shape[1:]))


def matrix_shapes(shape: Sequence[int], view: str | None, split_rows: Sequence[int]) -> tuple[MatrixShape, ...]:
    """Return the matrices in a parameter of ``shape``, blocks in row order."""
    batch = _as_batch(shape, view)
    rows = split_rows or (batch[-2],)
    return tuple(MatrixShape(math.prod(batch[:-2]), num_rows, batch[-1]) for num_rows in rows)


def matrix_blocks(tensor: Tensor, view: str | None, split_rows: Sequence[int]) -> list[Tensor]:
    """Return views of ``tensor`` (any shape), one for each entry of :func:`matrix_shapes`."""
    viewed = tensor.view(_as_batch(tensor.shape, view))
    return list(torch.split(viewed, list(split_rows), dim=-2)) if split_rows else [viewed]
