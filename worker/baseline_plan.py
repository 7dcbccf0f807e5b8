"""The plan of a baseline: which optimizer trains which parameter. Torch moves the rest, which nothing here foresees."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from torch import nn

from dmuon_runtime.baselines import DEFAULT_ADAMW_HINTS, BaselineConfig, route_parameters
from worker.contract.plan import ParameterPlan
from worker.contract.spec import AdamWOptimizer, JobSpec, KernelsSpec, MuonOptimizer, Optimizer, RoutingSpec

__all__ = ["BaselinePlan", "baseline_config", "baseline_plan"]


@dataclass(frozen=True, slots=True)
class BaselinePlan:
    """Parameters by optimizer, and a hash of all that ranks must agree on."""

    parameters: tuple[ParameterPlan, ...]
    hash: str
    warnings: tuple[str, ...]


def baseline_config(optimizer: Optimizer) -> BaselineConfig:
    """Return the optimizer section as the runtime's configuration."""
    assert isinstance(optimizer, MuonOptimizer | AdamWOptimizer)
    adamw = optimizer.adamw
    config = BaselineConfig(
        optimizer=optimizer.kind,
        lr=adamw.lr,
        weight_decay=adamw.weight_decay,
        weight_decay_exclude_1d=optimizer.weight_decay_exclude_1d,
        betas=adamw.betas,
        eps=adamw.eps,
    )
    if isinstance(optimizer, AdamWOptimizer):
        return config
    muon, hints = optimizer.muon, optimizer.adamw_name_hints
    return BaselineConfig(
        **vars(config)
        | {
            "muon_lr": muon.lr,
            "muon_momentum": muon.momentum,
            "muon_weight_decay": muon.weight_decay,
            "muon_ns_steps": muon.ns_steps,
            "muon_nesterov": muon.nesterov,
            "muon_adjust_lr_fn": muon.scale,
            "adamw_name_hints": DEFAULT_ADAMW_HINTS if hints is None else hints,
        }
    )


def baseline_plan(spec: JobSpec, model: nn.Module) -> BaselinePlan:
    """Return the plan of a model that may be on the meta device."""
    assert isinstance(spec.optimizer, MuonOptimizer | AdamWOptimizer)
    config = baseline_config(spec.optimizer)
    parameters = tuple(
        ParameterPlan(
            name=entry.name,
            aliases=entry.aliases,
            shape=tuple(entry.parameter.shape),
            elements=entry.parameter.numel(),
            route=entry.route,
            rule=entry.rule,
            owner=None,
            unit="",
        )
        for entry in route_parameters(model, spec.optimizer.kind, config.adamw_name_hints)
    )
    agreed = {
        "optimizer": spec.optimizer.model_dump(mode="json"),
        "mesh": spec.mesh.model_dump(mode="json"),
        "precision": spec.training.precision,
        "parameters": [entry.model_dump(mode="json") for entry in parameters],
    }
    text = json.dumps(agreed, sort_keys=True)
    return BaselinePlan(parameters, hashlib.sha256(text.encode()).hexdigest(), tuple(_unused(spec)))


def _unused(spec: JobSpec) -> list[str]:
    """Say which sections a baseline does not read, where they are filled in."""
    kind, defaults = spec.optimizer.kind, RoutingSpec()
    filled = [
        f"/routing/{name}"
        for name in ("defaults", "overrides", "strict")
        if getattr(spec.routing, name) != getattr(defaults, name)
    ]
    filled += [] if spec.kernels == KernelsSpec() else ["/kernels"]
    return [f"{' and '.join(filled)} say nothing to the optimizer kind {kind!r}"] if filled else []
