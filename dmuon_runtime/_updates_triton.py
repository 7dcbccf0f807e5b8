"""Triton kernels of the element-wise passes of an update: one launch for many tensors, each read and written once.

Bytes an element with everything in float32: momentum 16, a change 12, AdamW 28; plain torch moves 40, 36 and 120.
All arithmetic is in float32, whatever the dtypes. A closed gate masks every load and store.

P programs of one launch; what each works on stands in a table (:mod:`dmuon_runtime._tables`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuon_runtime._tables import Table, tables
from dmuon_runtime._tables_triton import address, launch, row_of, size_of

__all__ = ["adamw", "apply_changes", "momentum"]

BLOCK = 4096
NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _span(row, block, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a block's offsets [BLOCK] into its tensor, and which of them are in it."""
    offset = block * BLOCK + tl.arange(0, BLOCK)
    return offset, offset < size_of(row, ALIGNED)


@triton.jit  # type: ignore[untyped-decorator]
def _open(gate, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether the gate is open, [BLOCK]: Triton's interpreter makes numbers of a lone truth value."""
    return tl.full([BLOCK], tl.load(gate), tl.float32) > 0


@triton.jit  # type: ignore[untyped-decorator]
def _momentum(  # type: ignore[no-untyped-def]
    rows, work, gate, momentum, M: tl.constexpr, G: tl.constexpr, A: tl.constexpr, ALIGNED: tl.constexpr,
    GATED: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = row_of(rows, work, 3)
    offset, inside = _span(row, block, ALIGNED, BLOCK)
    buffer, gradient = address(row, 0, M, ALIGNED) + offset, address(row, 1, G, ALIGNED) + offset
    m = tl.load(buffer, mask=inside, other=0.0).to(tl.float32)
    factor = momentum
    applied = inside
    if GATED:
        is_open = _open(gate, BLOCK)
        applied = inside & is_open
        factor = tl.where(is_open, momentum, 1.0)
    g = tl.load(gradient, mask=applied, other=0.0).to(tl.float32)
    kept = (m * factor + g).to(M)
    tl.store(buffer, kept, mask=applied)
    if AHEAD:
        ahead = address(row, 2, A, ALIGNED) + offset
        tl.store(ahead, (g + momentum * kept.to(tl.float32)).to(A), mask=inside)


def momentum(
    buffers: Sequence[Tensor], gradients: Sequence[Tensor], momentum: float, nesterov: bool, gate: Tensor | None
) -> list[Tensor]:
    """Update each ``m <- mu m + g``; return each ``g + mu m`` in a tensor of its own (nesterov), or ``buffers``."""
    aheads = list(buffers)
    if nesterov:
        pairs = zip(buffers, gradients, strict=True)
        aheads = [torch.empty_like(m, dtype=torch.promote_types(g.dtype, m.dtype)) for m, g in pairs]
    for table in tables((buffers, gradients, aheads), _programs):
        launch(
            _momentum, table, _or_any(gate, table), float(momentum),
            GATED=gate is not None, AHEAD=nesterov, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return aheads


@triton.jit  # type: ignore[untyped-decorator]
def _apply_change(  # type: ignore[no-untyped-def]
    rows, work, gate, squares, factor, keep, W: tl.constexpr, D: tl.constexpr, ALIGNED: tl.constexpr,
    GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = row_of(rows, work, 2)
    offset, inside = _span(row, block, ALIGNED, BLOCK)
    if GATED:
        inside = inside & _open(gate, BLOCK)
    scaled = (tl.load(row + 1).to(tl.float64, bitcast=True) * factor).to(tl.float32)
    weight = address(row, 0, W, ALIGNED) + offset
    change = tl.load(address(row, 1, D, ALIGNED) + offset, mask=inside, other=0.0).to(tl.float32) * scaled
    w = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight, (w * keep + change).to(W), mask=inside)
    tl.store(squares + tl.program_id(0), tl.sum(change * change, axis=0))


def apply_changes(
    weights: Sequence[Tensor], directions: Sequence[Tensor], scales: Sequence[float], factor: float, keep: float,
    gate: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Do each ``w <- keep w + factor scale direction``; return sums of squares of the last term, float32 [P] each."""
    found: dict[int, Tensor] = {}
    for table in tables((weights, directions), _programs, numbers=scales):
        squares = torch.empty(len(table.work), dtype=torch.float32, device=table.device)
        launch(
            _apply_change, table, _or_any(gate, table), squares, float(factor), float(keep),
            GATED=gate is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
        found.update(zip(table.members, torch.split(squares, table.num_programs), strict=True))
    return _in_order(found, weights)


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    rows, work, gate, squares, lr, beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps, keep,
    W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, V: tl.constexpr, T: tl.constexpr,
    ALIGNED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = row_of(rows, work, 5)
    offset, inside = _span(row, block, ALIGNED, BLOCK)
    if GATED:
        inside = inside & _open(gate, BLOCK)
    weight, exp_avg, exp_avg_sq = (
        address(row, 0, W, ALIGNED) + offset, address(row, 2, M, ALIGNED) + offset,
        address(row, 3, V, ALIGNED) + offset,
    )  # fmt: skip
    step = tl.load(address(row, 4, T, ALIGNED)).to(tl.float32)
    t = tl.maximum(step, 1.0).to(tl.float64)  # 1 - b^t cancels in single precision
    correction1 = (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
    root2 = tl.sqrt(1.0 - tl.exp(t * log_beta2)).to(tl.float32)
    g = tl.load(address(row, 1, G, ALIGNED) + offset, mask=inside, other=0.0).to(tl.float32)
    m = (tl.load(exp_avg, mask=inside, other=0.0).to(tl.float32) * beta1 + rest1 * g).to(M)
    v = (tl.load(exp_avg_sq, mask=inside, other=0.0).to(tl.float32) * beta2 + rest2 * g * g).to(V)
    tl.store(exp_avg, m, mask=inside)
    tl.store(exp_avg_sq, v, mask=inside)
    denominator = tl.sqrt(v.to(tl.float32)) / root2 + eps
    change = m.to(tl.float32) / denominator / correction1 * -lr
    change = tl.where(inside, change, 0.0)
    w = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight, (w * keep + change).to(W), mask=inside)
    tl.store(squares + tl.program_id(0), tl.sum(change * change, axis=0))


def adamw(
    columns: Sequence[Sequence[Tensor]], gate: Tensor | None, *, lr: float, betas: tuple[float, float], eps: float,
    keep: float,
) -> list[Tensor]:  # fmt: skip
    """Do one AdamW step of each tensor; return sums of squares of their changes before decay, float32 [P] each.

    Args:
        columns: weights, gradients, both averages, and step counts (0-dim) that count this step already.
    """
    numbers = [x for beta in betas for x in (float(beta), 1.0 - beta, math.log(beta) if beta > 0 else -math.inf)]
    found: dict[int, Tensor] = {}
    for table in tables(columns, _programs):
        squares = torch.empty(len(table.work), dtype=torch.float32, device=table.device)
        launch(
            _adamw, table, _or_any(gate, table), squares, float(lr), *numbers, float(eps), float(keep),
            GATED=gate is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
        found.update(zip(table.members, torch.split(squares, table.num_programs), strict=True))
    return _in_order(found, columns[0])


def _programs(size: int) -> int:
    return -(-size // BLOCK)


def _or_any(gate: Tensor | None, table: Table) -> Tensor:
    """Return the gate, or a tensor in its place that nobody reads."""
    return table.rows if gate is None else gate


def _in_order(found: dict[int, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Return what was found for each weight, zeros [0] for those without elements."""
    return [
        found[index] if index in found else torch.zeros(0, device=weight.device) for index, weight in enumerate(weights)
    ]
