"""Which matrices a parameter holds: the one place that reads ``matrix_view`` and ``split_rows``.

A matrix is the linear map as ``nn.Linear`` stores it: [outputs, inputs]. A parameter of two dims is one, or has a view:
``transposed`` reads [inputs, outputs], as GPT-2 stores its weights; ``flatten`` reads [dim 0, rest]; ``experts`` keeps
all but the last two dims as a batch, and ``experts_transposed`` does so with the last two exchanged. ``split_rows``
cuts the rows of each matrix, which are its outputs whatever the view, into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["MATRIX_VIEWS", "MatrixShape", "MatrixView", "join_blocks", "matrix_blocks", "matrix_shapes"]

MatrixView = Literal["flatten", "experts", "transposed", "experts_transposed"]
MATRIX_VIEWS: tuple[MatrixView, ...] = get_args(MatrixView)


@dataclass(frozen=True)
class MatrixShape:
    """``count`` equal matrices of ``rows`` by ``columns``."""

    count: int
    rows: int
    columns: int


def _as_batch(shape: Sequence[int], view: str | None) -> tuple[int, ...]:
    """Return the shape as a batch of matrices, in the order of memory."""
    if len(shape) == 2 or (len(shape) > 2 and view in ("experts", "experts_transposed")):
        return tuple(shape)
    first = shape[0] if shape else 1
    return (first, math.prod(shape[1:]))


def _is_transposed(view: str | None) -> bool:
    return view in ("transposed", "experts_transposed")


def matrix_shapes(shape: Sequence[int], view: str | None, split_rows: Sequence[int]) -> tuple[MatrixShape, ...]:
    """Return the matrices in a parameter of ``shape``, blocks in row order."""
    *batch, rows, columns = _as_batch(shape, view)
    if _is_transposed(view):
        rows, columns = columns, rows
    return tuple(MatrixShape(math.prod(batch), num_rows, columns) for num_rows in split_rows or (rows,))


def matrix_blocks(tensor: Tensor, view: str | None, split_rows: Sequence[int]) -> list[Tensor]:
    """Return views of ``tensor`` (any shape), [..., rows, columns] for each entry of :func:`matrix_shapes`."""
    batch = _as_batch(tensor.shape, view)
    viewed = tensor if tensor.shape == batch else tensor.view(batch)
    viewed = viewed.mT if _is_transposed(view) else viewed
    return list(torch.split(viewed, list(split_rows), dim=-2)) if split_rows else [viewed]


def join_blocks(blocks: Sequence[Tensor], shape: Sequence[int], view: str | None) -> Tensor:
    """Return what :func:`matrix_blocks` cut, put together again: [shape]."""
    whole = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=-2)
    return (whole.mT if _is_transposed(view) else whole).reshape(tuple(shape))
