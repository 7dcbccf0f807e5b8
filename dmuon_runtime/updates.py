"""The element-wise passes of an update on many tensors: one Triton kernel for all on CUDA, plain torch elsewhere.

The gate, where there is one, is a 0-dim float tensor on the device: 1 applies the update, 0 leaves every bit of weights
and state as it was, without the host knowing which.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from dmuon_runtime._tables import DTYPES

__all__ = ["apply_changes", "decay", "fused_for", "gated_factor", "look_ahead", "momentum_updates"]

CACHED_ELEMENTS: Final = 2**17
"""1.5 MiB of the three tensors of an operation in float32: about what a core has of second-level cache."""


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
    looked_ahead: list[Tensor] = []
    for run in _runs(buffers, gradients):
        looked_ahead += _plain_momentum(buffers[run], gradients[run], momentum, nesterov, gate)
    return looked_ahead


def _passed(tensors: Sequence[Tensor], gate: Tensor | None) -> list[Tensor]:
    """Return the tensors, zeros in their place where the gate is closed."""
    return list(tensors) if gate is None else [torch.where(gate > 0, tensor, 0.0) for tensor in tensors]


def look_ahead(
    buffers: Sequence[Tensor], gradients: Sequence[Tensor], momentum: float, nesterov: bool, gate: Tensor | None
) -> list[Tensor]:
    """Return again what :func:`momentum_updates` returned, of buffers that it has updated; nothing is changed."""
    if not nesterov:
        return list(buffers)
    pairs = zip(buffers, _passed(gradients, gate), strict=True)
    return [gradient.add(buffer, alpha=momentum) for buffer, gradient in pairs]


def _plain_momentum(
    buffers: Sequence[Tensor], gradients: Sequence[Tensor], momentum: float, nesterov: bool, gate: Tensor | None
) -> list[Tensor]:
    kept, added = list(buffers), _passed(gradients, gate)
    decay(kept, momentum, gate)
    torch._foreach_add_(kept, added)
    return list(torch._foreach_add(added, kept, alpha=momentum)) if nesterov else kept


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
    found: list[Tensor] = []
    for run in _runs(weights, directions):
        found += _plain_change(weights[run], directions[run], scales[run], lr, decay_rate, gate)
    return found


def _plain_change(
    weights: Sequence[Tensor],
    directions: Sequence[Tensor],
    scales: Sequence[float],
    lr: float | Tensor,
    decay_rate: float | Tensor,
    gate: Tensor | None,
) -> list[Tensor]:
    if isinstance(lr, Tensor):
        changes = list(torch._foreach_mul(list(directions), list(scales)))
        torch._foreach_mul_(changes, -lr)
    else:
        changes = list(torch._foreach_mul(list(directions), [-lr * scale for scale in scales]))
    changes = _passed(changes, gate)
    if isinstance(decay_rate, Tensor) or decay_rate != 0.0:
        decay(list(weights), 1.0 - decay_rate, gate)
    torch._foreach_add_(list(weights), [c.to(w.dtype) for w, c in zip(weights, changes, strict=True)])
    return list(torch.stack(torch._foreach_norm(changes)).double().square().unbind())


def _runs(first: Sequence[Tensor], second: Sequence[Tensor]) -> Iterator[slice]:
    """Cut two lists into runs of equal dtypes that a CPU's cache holds: small tensors together, large ones alone."""
    begin, elements, kind = 0, 0, None
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        size, of = one.numel(), (one.dtype, other.dtype, one.device)
        if index > begin and (of != kind or elements + size > CACHED_ELEMENTS):
            yield slice(begin, index)
            begin, elements = index, 0
        elements, kind = elements + size, of
    if first:
        yield slice(begin, len(first))
