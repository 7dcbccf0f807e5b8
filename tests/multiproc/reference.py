"""One process that trains as N ranks would: mean of per-rank gradients, then Muon or AdamW from the formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dmuon_runtime import NewtonSchulz

__all__ = ["Backward", "PolarNewtonSchulz", "ReferenceTrainer"]

Backward = Callable[[nn.Module, int, int], None]
"""``(model, step, rank)``: run forwards and backwards of one step on one rank."""


def _quintic(matrix: Tensor, steps: int) -> Tensor:
    x = matrix.double()
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    for _ in range(steps):
        gram = x @ x.mT
        x = 2.0 * x - 1.5 * gram @ x + 0.5 * gram @ gram @ x
    return x


class PolarNewtonSchulz(NewtonSchulz):
    """A stand-in in float64, so that equality with the reference tests the runtime and not rounding."""

    def each_round(
        self, like: Sequence[Tensor], load: Callable[[Sequence[int]], list[Tensor]], steps: int = 5
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Yield the iterate of each [..., m, n], a round for each."""
        for index in range(len(like)):
            [matrix] = load([index])
            yield [index], [_quintic(matrix, steps).to(matrix.dtype)]


@dataclass
class ReferenceTrainer:
    """``routes`` maps parameter names to routes, ``splits`` to row blocks, ``views`` to how they hold matrices."""

    model: nn.Module
    routes: Mapping[str, str]
    world_size: int
    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.0
    adamw_lr: float = 1e-3
    adamw_weight_decay: float = 0.01
    splits: Mapping[str, Sequence[int]] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)
    max_norm: float | None = None
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    num_updates: dict[str, int] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)

    def mean_gradients(self, backward: Backward, step: int) -> dict[str, Tensor]:
        """Return the mean over ranks; a rank without a gradient counts as zero, none at all leaves the name out."""
        found: dict[str, list[Tensor]] = {}
        for rank in range(self.world_size):
            replica = copy.deepcopy(self.model)
            backward(replica, step, rank)
            for name, parameter in replica.named_parameters():
                if parameter.grad is not None:
                    found.setdefault(name, []).append(parameter.grad)
        return {name: sum(parts[1:], parts[0]) / self.world_size for name, parts in found.items()}

    def step(self, backward: Backward, step: int) -> None:
        """Do one step as ``world_size`` ranks."""
        gradients = self.mean_gradients(backward, step)
        self.norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())))
        if self.max_norm is not None:
            factor = min(1.0, self.max_norm / (self.norms[-1] + 1e-6))
            gradients = {name: g * factor for name, g in gradients.items()}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in gradients:
                    rule = self._muon if self.routes[name] == "muon" else self._adamw
                    rule(name, parameter, gradients[name])

    def _muon(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        old = self.state.setdefault(name, {"m": torch.zeros_like(weight)})["m"]
        new = self.momentum * old + gradient
        self.state[name]["m"] = new
        ahead = gradient + self.momentum * new
        weight *= 1 - self.lr * self.weight_decay
        view = self.views.get(name, "")
        matrix = ahead.flatten(1) if view == "flatten" else ahead
        matrix = matrix.mT if "transposed" in view else matrix
        blocks = matrix.split(list(self.splits.get(name, [matrix.shape[-2]])), dim=-2)
        scaled = [_quintic(b, 5).to(b.dtype) * 0.2 * math.sqrt(max(b.shape[-2:])) for b in blocks]
        change = torch.cat(scaled, dim=-2)
        weight -= self.lr * (change.mT if "transposed" in view else change).reshape(weight.shape)

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        zeros = {"m": torch.zeros_like(weight), "v": torch.zeros_like(weight)}
        state = self.state.setdefault(name, zeros)
        t = self.num_updates[name] = self.num_updates.get(name, 0) + 1
        state["m"] = 0.9 * state["m"] + 0.1 * gradient
        state["v"] = 0.999 * state["v"] + 0.001 * gradient**2
        weight *= 1 - self.adamw_lr * self.adamw_weight_decay
        m_hat, v_hat = state["m"] / (1 - 0.9**t), state["v"] / (1 - 0.999**t)
        weight -= self.adamw_lr * m_hat / (v_hat.sqrt() + 1e-8)
