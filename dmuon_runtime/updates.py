"""The element-wise passes of an update on one tensor: fused Triton kernels on CUDA, plain torch elsewhere.

The gate, where there is one, is a 0-dim float tensor on the device: 1 applies the update, 0 leaves every bit of weights
and state as it was, without the host knowing which.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["apply_change", "decay", "fused_for", "gated_factor", "momentum_update"]


@lru_cache(maxsize=1)
def _fused() -> ModuleType | None:
    """The Triton kernels, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dmuon_runtime._updates_triton")


def fused_for(tensors: Iterable[Tensor]) -> ModuleType | None:
    """Return the fused kernels where they can take ``tensors``: on CUDA, contiguous, of at most 32 bits."""
    for tensor in tensors:
        if tensor.device.type != "cuda" or tensor.dtype == torch.float64 or not tensor.is_contiguous():
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


def momentum_update(buffer: Tensor, gradient: Tensor, momentum: float, nesterov: bool, gate: Tensor | None) -> Tensor:
    """Update ``m <- mu m + g`` and return what is orthogonalised: ``g + mu m`` (nesterov) or ``m`` itself.

    Args:
        buffer: m, any shape and floating dtype; changed in place.
        gradient: g, of the same shape.
    """
    fused = fused_for((buffer, gradient))
    if fused is not None:
        ahead: Tensor = fused.momentum(buffer, gradient, momentum, nesterov, gate)
        return ahead
    if gate is None:
        buffer.mul_(momentum).add_(gradient)
    else:
        gradient = torch.where(gate > 0, gradient, 0.0)
        buffer.mul_(gated_factor(momentum, gate, buffer.dtype)).add_(gradient)
    return gradient.add(buffer, alpha=momentum) if nesterov else buffer


def apply_change(
    weight: Tensor, direction: Tensor, factor: float | Tensor, decay_rate: float | Tensor, gate: Tensor | None
) -> Tensor:
    """Do ``w <- (1 - decay_rate) w + factor direction`` in place; return sums of squares of the change before decay.

    Args:
        weight: w, any shape and floating dtype.
        direction: of the same shape.
        factor: minus the learning rate, times a scale.
        decay_rate: learning rate times weight decay.

    Returns:
        Sums over parts of the tensor, any shape; their sum is that of the whole change.
    """
    fused = fused_for((weight, direction))
    if fused is not None and not isinstance(factor, Tensor) and not isinstance(decay_rate, Tensor):
        squares: Tensor = fused.apply_change(weight, direction, factor, 1.0 - decay_rate, gate)
        return squares
    change = direction * factor
    if gate is not None:
        change = torch.where(gate > 0, change, 0.0)
    if isinstance(decay_rate, Tensor) or decay_rate != 0.0:
        decay([weight], 1.0 - decay_rate, gate)
    weight.add_(change.to(weight.dtype))
    norm: Tensor = torch.linalg.vector_norm(change)
    return norm.double().square()
