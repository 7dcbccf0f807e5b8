"""Triton kernels of the element-wise passes of an update: each tensor is read once and written once.

Bytes an element with everything in float32: momentum 16, a change 12, AdamW 28; plain torch moves 40, 36 and 120.
All arithmetic is in float32, whatever the dtypes. A closed gate masks every load and store.

P programs of one launch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["adamw", "apply_change", "momentum"]

BLOCK = 4096
NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _momentum(  # type: ignore[no-untyped-def]
    buffer, gradient, ahead, gate, momentum, num_elements, GATED: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_elements
    m = tl.load(buffer + offset, mask=inside, other=0.0).to(tl.float32)
    factor = momentum
    applied = inside
    if GATED:
        is_open = tl.load(gate) > 0
        applied = inside & is_open
        factor = tl.where(is_open, momentum, 1.0)
    g = tl.load(gradient + offset, mask=applied, other=0.0).to(tl.float32)
    kept = (m * factor + g).to(buffer.dtype.element_ty)
    tl.store(buffer + offset, kept, mask=applied)
    if AHEAD:
        tl.store(ahead + offset, (g + momentum * kept.to(tl.float32)).to(ahead.dtype.element_ty), mask=inside)


def momentum(buffer: Tensor, gradient: Tensor, momentum: float, nesterov: bool, gate: Tensor | None) -> Tensor:
    """Update ``m <- mu m + g``; return ``g + mu m`` in a tensor of its own (nesterov), or ``buffer``."""
    ahead = torch.empty_like(buffer, dtype=torch.result_type(gradient, buffer)) if nesterov else buffer
    count = buffer.numel()
    if count:
        with torch.cuda.device(buffer.device):
            _momentum[(-(-count // BLOCK),)](
                buffer, gradient, ahead, buffer if gate is None else gate, float(momentum), count,
                gate is not None, nesterov, BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
    return ahead


@triton.jit  # type: ignore[untyped-decorator]
def _apply_change(  # type: ignore[no-untyped-def]
    weight, direction, gate, squares, factor, keep, num_elements, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_elements
    if GATED:
        inside = inside & (tl.load(gate) > 0)
    change = tl.load(direction + offset, mask=inside, other=0.0).to(tl.float32) * factor
    w = tl.load(weight + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight + offset, (w * keep + change).to(weight.dtype.element_ty), mask=inside)
    tl.store(squares + tl.program_id(0), tl.sum(change * change, axis=0))


def apply_change(weight: Tensor, direction: Tensor, factor: float, keep: float, gate: Tensor | None) -> Tensor:
    """Do ``w <- keep w + factor direction``; return sums of squares of ``factor direction``, float32 [P]."""
    count = weight.numel()
    num_programs = -(-count // BLOCK)
    squares = torch.empty(num_programs, dtype=torch.float32, device=weight.device)
    if count:
        with torch.cuda.device(weight.device):
            _apply_change[(num_programs,)](
                weight, direction, weight if gate is None else gate, squares, float(factor), float(keep), count,
                gate is not None, BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
    return squares


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, exp_avg, exp_avg_sq, step, gate, squares,
    lr, beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps, keep, num_elements,
    GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_elements
    if GATED:
        inside = inside & (tl.load(gate) > 0)
    t = tl.maximum(tl.load(step), 1.0).to(tl.float64)  # 1 - b^t cancels in single precision
    correction1 = (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
    root2 = tl.sqrt(1.0 - tl.exp(t * log_beta2)).to(tl.float32)
    g = tl.load(gradient + offset, mask=inside, other=0.0).to(tl.float32)
    m = (tl.load(exp_avg + offset, mask=inside, other=0.0).to(tl.float32) * beta1 + rest1 * g).to(
        exp_avg.dtype.element_ty
    )
    v = (tl.load(exp_avg_sq + offset, mask=inside, other=0.0).to(tl.float32) * beta2 + rest2 * g * g).to(
        exp_avg_sq.dtype.element_ty
    )
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)
    denominator = tl.sqrt(v.to(tl.float32)) / root2 + eps
    change = m.to(tl.float32) / denominator / correction1 * -lr
    change = tl.where(inside, change, 0.0)
    w = tl.load(weight + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight + offset, (w * keep + change).to(weight.dtype.element_ty), mask=inside)
    tl.store(squares + tl.program_id(0), tl.sum(change * change, axis=0))


def adamw(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, gate: Tensor | None,
    *, lr: float, betas: tuple[float, float], eps: float, keep: float,
) -> Tensor:  # fmt: skip
    """Do one AdamW step of one tensor, ``step`` (0-dim) counting it already; return sums of squares, float32 [P]."""
    count = weight.numel()
    num_programs = -(-count // BLOCK)
    squares = torch.empty(num_programs, dtype=torch.float32, device=weight.device)
    numbers = [x for beta in betas for x in (float(beta), 1.0 - beta, math.log(beta) if beta > 0 else -math.inf)]
    if count:
        with torch.cuda.device(weight.device):
            _adamw[(num_programs,)](
                weight, gradient, exp_avg, exp_avg_sq, step, weight if gate is None else gate, squares,
                float(lr), *numbers, float(eps), float(keep), count, gate is not None, BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
    return squares
