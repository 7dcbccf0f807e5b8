"""AdamW with decoupled decay over lists of tensors, each with its own step count.

The gate, where there is one, is a 0-dim float tensor on the device: 1 applies the step, 0 leaves every bit of weights
and state as it was, without the host knowing which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AdamWSettings", "AdamWTensors", "adamw_update", "apply_change", "gated_factor"]


@dataclass(frozen=True)
class AdamWSettings:
    """Hyper-parameters of one group in one step; ``lr`` may be a 0-dim tensor on the device of the weights."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class AdamWTensors:
    """Parallel lists: weights, gradients and state of equal shapes, and 0-dim float step counts."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]


def adamw_update(tensors: AdamWTensors, settings: AdamWSettings, gate: Tensor | None) -> list[Tensor]:
    """Update in place and return the change of each weight before decay (its sign included).

    ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``, ``w <- (1 - lr wd) w - lr/(1 - b1^t) m / (sqrt(v)/sqrt(1 -
    b2^t) + eps)`` (Loshchilov and Hutter, 2019).
    """
    beta1, beta2 = settings.betas
    if not tensors.weights:
        return []
    gradients = list(tensors.gradients)
    if gate is not None:
        gradients = [torch.where(gate > 0, gradient, 0.0) for gradient in gradients]
    if gate is None:
        torch._foreach_add_(list(tensors.steps), 1.0)
    else:  # as a list: a lone tensor would be read on the host
        torch._foreach_add_(list(tensors.steps), [gate] * len(tensors.steps))
    _decay(tensors.exp_avgs, beta1, gate)
    torch._foreach_add_(list(tensors.exp_avgs), gradients, alpha=1 - beta1)
    _decay(tensors.exp_avg_sqs, beta2, gate)
    torch._foreach_addcmul_(list(tensors.exp_avg_sqs), gradients, gradients, value=1 - beta2)
    steps = [step.clamp_min(1.0).double() for step in tensors.steps]  # 1 - b^t cancels in single precision
    corrections1 = [1 - beta1**step for step in steps]
    roots2 = [(1 - beta2**step).sqrt() for step in steps]
    denominators = torch._foreach_sqrt(list(tensors.exp_avg_sqs))
    torch._foreach_div_(denominators, roots2)
    torch._foreach_add_(denominators, settings.eps)
    changes = list(torch._foreach_div(list(tensors.exp_avgs), denominators))
    torch._foreach_div_(changes, corrections1)
    torch._foreach_mul_(changes, -settings.lr)
    if gate is not None:
        torch._foreach_mul_(changes, gate)
    apply_change(tensors.weights, changes, settings.lr * settings.weight_decay, gate)
    return changes


def _decay(state: Sequence[Tensor], factor: float | Tensor, gate: Tensor | None) -> None:
    if gate is None:
        torch._foreach_mul_(list(state), factor)
    else:
        torch._foreach_mul_(list(state), gated_factor(factor, gate, state[0].dtype))


def gated_factor(factor: float | Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``factor`` (0-dim, exact in ``dtype``) where the gate is open, and 1 where it is closed."""
    if isinstance(factor, Tensor):
        value = factor.to(dtype)
    else:
        value = torch.full((), factor, dtype=dtype, device=gate.device)
    return torch.where(gate > 0, value, torch.ones_like(value))


def apply_change(
    weights: Sequence[Tensor], changes: Sequence[Tensor], decay: float | Tensor, gate: Tensor | None
) -> None:
    """Decay the weights by the factor ``1 - decay``, then add ``changes``; in place."""
    if isinstance(decay, Tensor) or decay != 0.0:
        _decay(weights, 1.0 - decay, gate)
    torch._foreach_add_(list(weights), [c.to(w.dtype) for w, c in zip(weights, changes, strict=True)])
