"""The element-wise passes of an update on many tensors: one Triton kernel for all on CUDA, plain torch elsewhere.

The gate, where there is one, is a 0-dim float tensor on the device: 1 applies the update, 0 leaves every bit of weights
and state as it was, without the host knowing which.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from types import ModuleType

import torch
from torch import Tensor

from dmuon_runtime._tables import DTYPES

__all__ = ["apply_changes", "decay", "fused_for", "gated_factor", "momentum_updates"]


@lru_cache(maxsize=1)
def _fused() -> ModuleType | None:
    """The Triton kernels, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dmuon_runtime._updates_triton")


def fused_for(tensors: Iterable[Tensor]) -> ModuleType | None:
    """Return the fused kernels where they can take ``tensors``: on CUDA, contiguous, of at most 32 bits."""
    for tensor in tensors:
        if tensor.device.type != "cuda" or tensor.dtype not in DTYPES or not tensor.is_contiguous():
            return None
    return _fused()


def gated_factor(factor: float | Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``factor`` (0-dim, exact in ``dtype``) where the gate is open, and 1 where it is closed."""
    if isinstance(factor, Tensor):
        value = factor.to(dtype)
    else:
        value = torch.full((), factor, dtype=dtype, device=gate.device)
    return torch.where(gate > 0, value, torch.ones_like(value))


def decay(state: list[Tensor], factor: float | Tensor, gate: Tensor | None) -> None:
    """Multiply tensors of one dtype by ``factor`` in place."""
    torch._foreach_mul_(state, factor if gate is None else gated_factor(factor, gate, state[0].dtype))


def momentum_updates(
    buffers: Sequence[Tensor], gradients: Sequence[Tensor], momentum: float, nesterov: bool, gate: Tensor | None
) -> list[Tensor]:
    """Update each ``m <- mu m + g``; return what is orthogonalised: each ``g + mu m`` (nesterov) or ``m`` itself.

    Args:
        buffers: m, any shapes and floating dtypes; changed in place.
        gradients: g, of the same shapes.
    """
    fused = fused_for(chain(buffers, gradients))
    if fused is not None:
        aheads: list[Tensor] = fused.momentum(buffers, gradients, momentum, nesterov, gate)
        return aheads
    pairs = zip(buffers, gradients, strict=True)
    return [_momentum_update(buffer, gradient, momentum, nesterov, gate) for buffer, gradient in pairs]


def _momentum_update(buffer: Tensor, gradient: Tensor, momentum: float, nesterov: bool, gate: Tensor | None) -> Tensor:
    """Do all of one tensor before the next: a CPU then finds it in its cache."""
    if gate is None:
        buffer.mul_(momentum).add_(gradient)
    else:
        gradient = torch.where(gate > 0, gradient, 0.0)
        buffer.mul_(gated_factor(momentum, gate, buffer.dtype)).add_(gradient)
    return gradient.add(buffer, alpha=momentum) if nesterov else buffer


def apply_changes(
    weights: Sequence[Tensor],
    directions: Sequence[Tensor],
    scales: Sequence[float],
    lr: float | Tensor,
    decay_rate: float | Tensor,
    gate: Tensor | None,
) -> list[Tensor]:
    """Do each ``w <- (1 - decay_rate) w - lr scale direction``; return sums of squares of the changes before decay.

    Args:
        weights: w, any shapes and floating dtypes; changed in place.
        directions: of the same shapes.
        scales: one for each weight.
        lr: learning rate; it and ``decay_rate`` may be 0-dim tensors on the device of the weights.
        decay_rate: learning rate times weight decay.

    Returns:
        For each weight sums over parts of it, any shape; their sum is that of the whole change.
    """
    fused = fused_for(chain(weights, directions))
    if fused is not None and not isinstance(lr, Tensor) and not isinstance(decay_rate, Tensor):
        squares: list[Tensor] = fused.apply_changes(weights, directions, scales, -lr, 1.0 - decay_rate, gate)
        return squares
    rows = zip(weights, directions, scales, strict=True)
    return [_apply_change(weight, direction, -lr * scale, decay_rate, gate) for weight, direction, scale in rows]


def _apply_change(
    weight: Tensor, direction: Tensor, factor: float | Tensor, decay_rate: float | Tensor, gate: Tensor | None
) -> Tensor:
    change = direction * factor
    if gate is not None:
        change = torch.where(gate > 0, change, 0.0)
    if isinstance(decay_rate, Tensor) or decay_rate != 0.0:
        decay([weight], 1.0 - decay_rate, gate)
    weight.add_(change.to(weight.dtype))
    norm: Tensor = torch.linalg.vector_norm(change)
    return norm.double().square()
