"""AdamW with decoupled decay over lists of tensors, each with its own step count; see ``updates`` for the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dmuon_runtime.updates import decay, fused_for

__all__ = ["AdamWSettings", "AdamWTensors", "adamw_update"]


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
    """Update in place; return for each weight sums of squares of its change before decay, which add up to the whole.

    ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``, ``w <- (1 - lr wd) w - lr/(1 - b1^t) m / (sqrt(v)/sqrt(1 -
    b2^t) + eps)`` (Loshchilov and Hutter, 2019).
    """
    if not tensors.weights:
        return []
    if gate is None:
        torch._foreach_add_(list(tensors.steps), 1.0)
    else:  # as a list: a lone tensor would be read on the host
        torch._foreach_add_(list(tensors.steps), [gate] * len(tensors.steps))
    fused = fused_for([*tensors.weights, *tensors.gradients, *tensors.exp_avgs, *tensors.exp_avg_sqs])
    if fused is not None and not isinstance(settings.lr, Tensor):
        return _fused_update(fused, tensors, settings, settings.lr, gate)
    return _plain_update(tensors, settings, gate)


def _fused_update(
    fused: ModuleType, tensors: AdamWTensors, settings: AdamWSettings, lr: float, gate: Tensor | None
) -> list[Tensor]:
    columns = (tensors.weights, tensors.gradients, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.steps)
    keep = 1.0 - lr * settings.weight_decay
    squares: list[Tensor] = fused.adamw(columns, gate, lr=lr, betas=settings.betas, eps=settings.eps, keep=keep)
    return squares


def _plain_update(tensors: AdamWTensors, settings: AdamWSettings, gate: Tensor | None) -> list[Tensor]:
    beta1, beta2 = settings.betas
    weights, exp_avgs, exp_avg_sqs = list(tensors.weights), list(tensors.exp_avgs), list(tensors.exp_avg_sqs)
    gradients = list(tensors.gradients)
    if gate is not None:
        gradients = [torch.where(gate > 0, gradient, 0.0) for gradient in gradients]
    decay(exp_avgs, beta1, gate)
    torch._foreach_add_(exp_avgs, gradients, alpha=1 - beta1)
    decay(exp_avg_sqs, beta2, gate)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, value=1 - beta2)
    steps = torch.stack(list(tensors.steps)).clamp_min(1.0).double()  # 1 - b^t cancels in single precision
    corrections1 = list((1 - beta1**steps).unbind())
    roots2 = list((1 - beta2**steps).sqrt().unbind())
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, roots2)
    torch._foreach_add_(denominators, settings.eps)
    changes = list(torch._foreach_div(exp_avgs, denominators))
    torch._foreach_div_(changes, corrections1)
    torch._foreach_mul_(changes, -settings.lr)
    if gate is not None:
        torch._foreach_mul_(changes, gate)
    rate = settings.lr * settings.weight_decay
    if isinstance(rate, Tensor) or rate != 0.0:
        decay(weights, 1.0 - rate, gate)
    torch._foreach_add_(weights, [c.to(w.dtype) for w, c in zip(weights, changes, strict=True)])
    return list(torch.stack(torch._foreach_norm(changes)).double().square().unbind())
