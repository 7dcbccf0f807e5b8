"""Triton kernel of the symmetric product ``alpha * A @ B + beta * C``, lower triangle of tiles only.

Shapes: A [B, N, K], B given by its rows of B^T [B, N, K], C and the result [B, N, N]. A tile on the diagonal writes its
lower triangle and mirrors it, so that every element has one writer and the result is symmetric bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["symmetric_product"]


@dataclass(frozen=True, slots=True)
class _Config:
    """Tile side, depth of one step along K, warps and pipeline stages."""

    tile: int
    depth: int
    num_warps: int
    num_stages: int


_LARGE: Final = _Config(128, 64, 4, 4)
_SMALL: Final = _Config(64, 64, 4, 4)
_FEW_TILES: Final = 132


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, out_ptr, n, k, num_tiles, a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, out_batch,
    alpha, beta,
    HAS_C: tl.constexpr, EVEN_K: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    index, matrix = tl.program_id(0) % num_tiles, (tl.program_id(0) // num_tiles).to(tl.int64)
    i = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= index, i + 1, i)  # the root was rounded down
    i = tl.where(i * (i + 1) // 2 > index, i - 1, i)  # or up
    j = index - i * (i + 1) // 2
    rows = i * TILE + tl.arange(0, TILE)
    cols = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    a = a_ptr + matrix * a_batch + rows[:, None] * a_row + depth[None, :] * a_col
    b = b_ptr + matrix * b_batch + cols[:, None] * b_row + depth[None, :] * b_col
    row_in, col_in = rows[:, None] < n, cols[:, None] < n
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, k, DEPTH):
        if EVEN_K:
            x = tl.load(a, mask=row_in, other=0.0)
            y = tl.load(b, mask=col_in, other=0.0)
        else:
            x = tl.load(a, mask=row_in & (depth[None, :] + start < k), other=0.0)
            y = tl.load(b, mask=col_in & (depth[None, :] + start < k), other=0.0)
        total = tl.dot(x, y.T, total)
        a += DEPTH * a_col
        b += DEPTH * b_col
    total = total * alpha
    inside = (rows[:, None] >= cols[None, :]) & row_in & (cols[None, :] < n)
    place = rows[:, None] * n + cols[None, :]
    if HAS_C:
        total += beta * tl.load(c_ptr + matrix * c_batch + place, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + matrix * out_batch + place, result, mask=inside)
    mirror = (rows[None, :] > cols[:, None]) & (rows[None, :] < n) & col_in
    tl.store(out_ptr + matrix * out_batch + cols[:, None] * n + rows[None, :], result.T, mask=mirror)


def symmetric_product(a: Tensor, bt: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
    """Write the product to ``out`` [B, N, N], whose matrices are contiguous, as those of ``c`` must be.

    Args:
        a: [B, N, K], any strides.
        bt: the transpose of the right operand, [B, N, K], any strides.
        c: [B, N, N] symmetric, or None.
    """
    num_matrices, n, k = a.shape
    config = _LARGE
    if num_matrices * triton.cdiv(n, config.tile) ** 2 // 2 < _FEW_TILES:
        config = _SMALL
    rows = triton.cdiv(n, config.tile)
    num_tiles = rows * (rows + 1) // 2
    with torch.cuda.device(a.device):
        _kernel[(num_tiles * num_matrices,)](  # one axis: any other ends at 65 535, and a batch need not
            a, bt, c, out, n, k, num_tiles, *a.stride(), *bt.stride(), 0 if c is None else c.stride(0), out.stride(0),
            alpha, beta, c is not None, k % config.depth == 0, config.tile, config.depth,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
