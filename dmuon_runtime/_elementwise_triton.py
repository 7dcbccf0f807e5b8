"""Triton kernels of the element-wise passes. The normalisation reads once, then reads and writes once.

Bytes an element for bfloat16 input and float16 output: 2 + 2 + 2. Plain torch moves about 24.

E elements of a matrix, P partial results of a matrix, B batch of matrices. Grids have one axis: any other ends at
65 535, and a batch need not.

Hundreds of these are launched in a step, so the host's time counts: quotients are taken by Python's own integers, for
``triton.cdiv`` and ``triton.next_power_of_2`` take over a microsecond each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_identity", "cast", "normalize"]

BLOCK = 8192
MAX_PARTIALS = 256
"""Partial results of one matrix: enough blocks to fill the device, few enough for every block to read them all."""


@triton.jit  # type: ignore[untyped-decorator]
def _partials(  # type: ignore[no-untyped-def]
    g, largest, squares, num_elements, num_partials, per_program, BLOCK: tl.constexpr
):
    """Largest magnitude, and sum of squares over its square, of one program's span of one matrix."""
    part, matrix = tl.program_id(0) % num_partials, (tl.program_id(0) // num_partials).to(tl.int64)
    first = part.to(tl.int64) * per_program
    peak = 0.0
    total = 0.0
    for start in range(0, per_program, BLOCK):
        offset = first + start + tl.arange(0, BLOCK)
        inside = (offset < num_elements) & (start + tl.arange(0, BLOCK) < per_program)
        x = tl.load(g + matrix * num_elements + offset, mask=inside, other=0.0).to(tl.float32)
        block_peak = tl.max(tl.abs(x), axis=0)
        new_peak = tl.maximum(peak, block_peak)
        safe = tl.where(new_peak == 0.0, 1.0, new_peak)
        y = x / safe
        shrink = peak / safe
        total = total * shrink * shrink + tl.sum(y * y, axis=0)
        peak = new_peak
    tl.store(largest + matrix * num_partials + part, peak)
    tl.store(squares + matrix * num_partials + part, total)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(  # type: ignore[no-untyped-def]
    g, out, largest, squares, num_elements, num_partials, per_program, BLOCK: tl.constexpr, PARTIALS: tl.constexpr
):
    """Combine the partial results of a matrix and write one program's span of it."""
    part, matrix = tl.program_id(0) % num_partials, (tl.program_id(0) // num_partials).to(tl.int64)
    slot = tl.arange(0, PARTIALS)
    there = slot < num_partials
    peaks = tl.load(largest + matrix * num_partials + slot, mask=there, other=0.0)
    sums = tl.load(squares + matrix * num_partials + slot, mask=there, other=0.0)
    peak = tl.max(peaks, axis=0)
    safe = tl.where(peak == 0.0, 1.0, peak)
    share = peaks / safe
    total = tl.sum(sums * share * share, axis=0)
    inverse = 1.0 / tl.sqrt(tl.where(total == 0.0, 1.0, total))
    first = part.to(tl.int64) * per_program
    for start in range(0, per_program, BLOCK):
        offset = first + start + tl.arange(0, BLOCK)
        inside = (offset < num_elements) & (start + tl.arange(0, BLOCK) < per_program)
        x = tl.load(g + matrix * num_elements + offset, mask=inside, other=0.0).to(tl.float32)
        y = x / safe * inverse
        tl.store(out + matrix * num_elements + offset, y.to(out.dtype.element_ty), mask=inside)


def normalize(g: Tensor, out: Tensor) -> None:
    """Write ``g`` [B, M, N] over its Frobenius norms to ``out`` [B, M, N]; both contiguous, on one CUDA device."""
    num_matrices, num_elements = g.shape[0], g.shape[1] * g.shape[2]
    blocks = -(-num_elements // BLOCK)
    per_program = -(-blocks // MAX_PARTIALS) * BLOCK
    num_partials = -(-num_elements // per_program)
    largest, squares = torch.empty(2, num_matrices, num_partials, dtype=torch.float32, device=g.device).unbind()
    grid = (num_partials * num_matrices,)
    with torch.cuda.device(g.device):
        _partials[grid](g, largest, squares, num_elements, num_partials, per_program, BLOCK, num_warps=8)
        _divide[grid](
            g, out, largest, squares, num_elements, num_partials, per_program, BLOCK,
            1 << (num_partials - 1).bit_length(), num_warps=8,
        )  # fmt: skip


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
