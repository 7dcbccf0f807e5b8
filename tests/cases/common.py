"""What the cases share: a model whose gradients are exactly what the test says, and one step of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon_runtime as dmuon
from tests.multiproc.reference import PolarNewtonSchulz

__all__ = ["Weights", "dedicate", "masters", "plan", "train"]


class Weights(nn.Module):
    """Parameters by name; the loss is their product with given gradients, so those are what they get."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(tuple(shape), dtype=dtype)))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the scalar whose gradients are ``gradients``; parameters that are not named get none."""
        parts = [(self.get_parameter(name) * gradient).sum() for name, gradient in gradients.items()]
        return torch.stack(parts).sum()


def plan(model: nn.Module, overrides: Sequence[Mapping[str, object]] = (), ranks: int = 2) -> dmuon.RuntimePlan:
    """Return the plan of a model with everything under the runtime."""
    policy = {"overrides": list(overrides)}
    return dmuon.plan_params(model, ranks, lambda name, p: p.requires_grad, param_policy=policy)


def dedicate(
    model: nn.Module,
    overrides: Sequence[Mapping[str, object]] = (),
    defaults: Mapping[str, object] | None = None,
    **options: object,
) -> dmuon.Muon:
    """Put all of ``model`` under the runtime on all ranks; return its optimizer with an exact Newton-Schulz."""
    policy = {"defaults": dict(defaults or {}), "overrides": list(overrides)}
    mesh = dist.DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    dmuon.dedicate_params(model, mesh, lambda name, p: p.requires_grad, param_policy=policy)
    options.setdefault("ns_backend", PolarNewtonSchulz())
    return dmuon.Muon(model, **options)  # type: ignore[arg-type]


def train(model: nn.Module, optimizer: dmuon.Muon, gradients: Mapping[str, Tensor]) -> None:
    """Do one step with these gradients on this rank."""
    model(gradients).backward()
    optimizer.step()
    optimizer.zero_grad()


def masters(optimizer: dmuon.Muon) -> dict[str, Tensor]:
    """Return copies of this rank's weights by name."""
    return {piece.plan.name: piece.master.clone() for piece in optimizer.pieces}
