"""Triton kernels of the element-wise passes. The normalisation reads once, then reads and writes once.

Bytes an element for bfloat16 input and float16 output: 2 + 2 + 2. Plain torch moves about 24.

Two launches normalise many tensors; what each program works on stands in a table (:mod:`dmuon_runtime._tables`). Grids
have one axis: any other ends at 65 535, and a batch need not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon_runtime._tables import tables
from dmuon_runtime._tables_triton import address, launch, row_of, size_of

__all__ = ["add_identity", "cast", "normalize"]

BLOCK = 8192
MAX_PARTIALS = 256
"""Partial results of one matrix: enough blocks to fill the device, few enough for every block to read them all."""


@triton.jit  # type: ignore[untyped-decorator]
def _part(row, program, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MAX_PARTIALS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Say which part of which matrix a tensor's program does.

    Returns elements of a matrix, matrix, part, parts of a matrix, elements of a part.
    """
    size = size_of(row, ALIGNED)
    per_program = tl.cdiv(tl.cdiv(size, BLOCK), MAX_PARTIALS) * BLOCK
    num_partials = tl.cdiv(size, per_program)
    return size, program // num_partials, program % num_partials, num_partials, per_program


@triton.jit  # type: ignore[untyped-decorator]
def _partials(  # type: ignore[no-untyped-def]
    rows, work, largest, squares, G: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    """Largest magnitude, and sum of squares over its square, of one program's part of one matrix."""
    row, program = row_of(rows, work, 2)
    size, matrix, part, _, per_program = _part(row, program, ALIGNED, BLOCK, MAX_PARTIALS)
    g = address(row, 0, G, ALIGNED) + matrix * size
    first = part * per_program
    peak = 0.0
    total = 0.0
    for start in range(0, per_program, BLOCK):
        offset = first + start + tl.arange(0, BLOCK)
        x = tl.load(g + offset, mask=offset < size, other=0.0).to(tl.float32)
        block_peak = tl.max(tl.abs(x), axis=0)
        new_peak = tl.maximum(peak, block_peak)
        safe = tl.where(new_peak == 0.0, 1.0, new_peak)
        y = x / safe
        shrink = peak / safe
        total = total * shrink * shrink + tl.sum(y * y, axis=0)
        peak = new_peak
    tl.store(largest + tl.program_id(0), peak)
    tl.store(squares + tl.program_id(0), total)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(  # type: ignore[no-untyped-def]
    rows, work, largest, squares, G: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, MAX_PARTIALS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of a matrix and write one program's part of it."""
    row, program = row_of(rows, work, 2)
    size, matrix, part, num_partials, per_program = _part(row, program, ALIGNED, BLOCK, MAX_PARTIALS)
    slot = tl.program_id(0) - part + tl.arange(0, MAX_PARTIALS)
    there = tl.arange(0, MAX_PARTIALS) < num_partials
    peaks = tl.load(largest + slot, mask=there, other=0.0)
    sums = tl.load(squares + slot, mask=there, other=0.0)
    peak = tl.max(peaks, axis=0)
    safe = tl.where(peak == 0.0, 1.0, peak)
    share = peaks / safe
    total = tl.sum(sums * share * share, axis=0)
    inverse = 1.0 / tl.sqrt(tl.where(total == 0.0, 1.0, total))
    g, out = address(row, 0, G, ALIGNED) + matrix * size, address(row, 1, OUT, ALIGNED) + matrix * size
    first = part * per_program
    for start in range(0, per_program, BLOCK):
        offset = first + start + tl.arange(0, BLOCK)
        x = tl.load(g + offset, mask=offset < size, other=0.0).to(tl.float32)
        tl.store(out + offset, (x / safe * inverse).to(OUT), mask=offset < size)


def _num_partials(size: int) -> int:
    """Programs of a matrix, as :func:`_part` cuts it."""
    blocks = -(-size // BLOCK)
    per_program = -(-blocks // MAX_PARTIALS) * BLOCK
    return -(-size // per_program)


def normalize(tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Write the matrices of each [..., m, n] over their Frobenius norms to each out [b, m, n]; all contiguous."""
    for table in tables((tensors, outs), _num_partials, counts=[out.shape[0] for out in outs]):
        largest, squares = torch.empty(2, len(table.work), dtype=torch.float32, device=table.device).unbind()
        for kernel in (_partials, _divide):
            launch(kernel, table, largest, squares, BLOCK=BLOCK, MAX_PARTIALS=MAX_PARTIALS, num_warps=8)


@triton.jit  # type: ignore[untyped-decorator]
def _cast(x, out, num_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_elements
    tl.store(out + offset, tl.load(x + offset, mask=inside).to(tl.float32).to(out.dtype.element_ty), mask=inside)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous ``x`` in ``dtype``; torch's cast between 16-bit dtypes reaches a third of the bandwidth."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = 4096
    with torch.cuda.device(x.device):
        _cast[(-(-x.numel() // block),)](x, out, x.numel(), block, num_warps=8)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _add_identity(z, n, blocks, a, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    place = z + (tl.program_id(0) // blocks).to(tl.int64) * n * n + row.to(tl.int64) * (n + 1)
    value = tl.load(place, mask=row < n).to(tl.float32) + a
    tl.store(place, value.to(z.dtype.element_ty), mask=row < n)


def add_identity(z: Tensor, a: float) -> None:
    """Add ``a I`` to contiguous ``z`` [B, N, N] in place."""
    block = 256
    blocks = -(-z.shape[1] // block)
    with torch.cuda.device(z.device):
        _add_identity[(blocks * z.shape[0],)](z, z.shape[1], blocks, a, block, num_warps=2)
