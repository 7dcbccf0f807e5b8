"""From a spec to what the loop steps: the runtime's Muon, or torch's own optimizers under FSDP2 or DDP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon_runtime as dmuon
from dmuon_runtime.baselines import Tandem
from worker.baseline_plan import baseline_config
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.state import CheckpointedState, DmuonState
from worker.checkpoints.torch_state import TorchState
from worker.contract.spec import DmuonOptimizer, JobSpec
from worker.kernels import KernelSwitch
from worker.planner import runtime_arguments
from worker.routing import hook_boundaries, is_managed

__all__ = ["BaselineDriver", "DmuonDriver", "Driver", "Steps", "baseline_driver", "dmuon_driver", "shard_units"]


class Steps(Protocol):
    """What :class:`dmuon_runtime.Muon` and :class:`dmuon_runtime.baselines.Tandem` have in common."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups with ``lr`` each, which the schedule sets before every step."""
        ...

    @property
    def last_step(self) -> dmuon.StepOutcome | None:
        """What the last step did: skipped or not, and the size of the updates by route where that is measured."""
        ...

    def zero_grad(self) -> None:
        """Discard all gradients."""
        ...

    def step(self) -> None:
        """Update all weights, or none on any rank."""
        ...


class Driver(Protocol):
    """A model that trains, its optimizer, and what differs between the runtime and the baselines."""

    @property
    def model(self) -> nn.Module:
        """What forwards are called on."""
        ...

    @property
    def optimizer(self) -> Steps:
        """What steps."""
        ...

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [batch, sequence, vocabulary] of token ids int64 [batch, sequence]."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """In it backwards accumulate on their rank."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the global norm over all parameters; return it, 0-dim float32. ``last_step`` will know it too."""
        ...

    def rates(self) -> dict[str, float]:
        """Learning rates by route."""
        ...

    def counters(self) -> dmuon.CountersSnapshot | None:
        """What the runtime has counted; None where nothing counts."""
        ...

    def owner_compute_seconds(self) -> float | None:
        """Seconds of this rank's updates; None where nothing counts."""
        ...

    def settle(self) -> None:
        """Wait for the communication of a step that was issued, for its times are taken best while the device works."""
        ...

    def whole_state(self) -> dict[str, Tensor]:
        """Return the weights by full name as whole tensors, on rank 0 at least; collective."""
        ...

    def checkpointed(self, exchange: Exchange) -> CheckpointedState:
        """Return what checkpoints save and load; ranks tell each other of failed reads through ``exchange``."""
        ...


@dataclass(frozen=True, slots=True)
class DmuonDriver:
    """A dedicated model."""

    model: nn.Module
    optimizer: dmuon.Muon

    def forward(self, inputs: Tensor) -> Tensor:
        """As in :class:`Driver`."""
        logits: Tensor = self.model(input_ids=inputs).logits
        return logits

    def no_sync(self) -> AbstractContextManager[None]:
        """As in :class:`Driver`."""
        return dmuon.no_sync(self.model)

    def clip(self, max_norm: float) -> Tensor:
        """As in :class:`Driver`."""
        return dmuon.clip_grad_norm_(self.optimizer, max_norm)

    def rates(self) -> dict[str, float]:
        """As in :class:`Driver`."""
        return {str(group["route"]): float(group["lr"]) for group in self.optimizer.param_groups}

    def counters(self) -> dmuon.CountersSnapshot | None:
        """As in :class:`Driver`."""
        return dmuon.get_counters(self.model).snapshot()

    def owner_compute_seconds(self) -> float | None:
        """As in :class:`Driver`."""
        return dmuon.get_counters(self.model).owner_compute_seconds()

    def settle(self) -> None:
        """As in :class:`Driver`."""
        dmuon.get_counters(self.model).settle()

    def whole_state(self) -> dict[str, Tensor]:
        """As in :class:`Driver`."""
        return dmuon.get_model_state_dict(self.model)

    def checkpointed(self, exchange: Exchange) -> CheckpointedState:
        """As in :class:`Driver`."""
        return DmuonState(self.model, self.optimizer)


@dataclass(frozen=True, slots=True)
class BaselineDriver:
    """A plain model, or one under FSDP2 or DDP; with ``autocast`` its forward runs in that dtype on ``device``."""

    model: nn.Module
    optimizer: Tandem
    device: torch.device
    autocast: torch.dtype | None

    def forward(self, inputs: Tensor) -> Tensor:
        """As in :class:`Driver`."""
        cast = nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)
        with cast:
            logits: Tensor = self.model(input_ids=inputs).logits
        return logits

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in :class:`Driver`."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.model.set_requires_gradient_sync(True)
        elif isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    def clip(self, max_norm: float) -> Tensor:
        """As in :class:`Driver`."""
        return self.optimizer.clip(max_norm)

    def rates(self) -> dict[str, float]:
        """Rates by the mathematics of a group: groups without decay have the rate of the others."""
        return {
            "muon" if group["name"] == "muon" else "adamw": float(group["lr"]) for group in self.optimizer.param_groups
        }

    def counters(self) -> dmuon.CountersSnapshot | None:
        """None: torch counts neither its communication nor its Newton-Schulz."""
        return None

    def owner_compute_seconds(self) -> float | None:
        """None: torch has no owners."""
        return None

    def settle(self) -> None:
        """Nothing was counted."""

    def whole_state(self) -> dict[str, Tensor]:
        """As in :class:`Driver`."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def checkpointed(self, exchange: Exchange) -> CheckpointedState:
        """As in :class:`Driver`."""
        return TorchState(self.model, self.optimizer.optimizers, exchange)


def dmuon_driver(spec: JobSpec, model: nn.Module, mesh: DeviceMesh, switch: KernelSwitch) -> DmuonDriver:
    """Dedicate ``model`` and make its Muon; ``mesh`` is 2-D, ``replicate`` by ``shard``. Collective.

    Raises:
        dmuon_runtime.DMuonError: the runtime refuses.
    """
    assert isinstance(spec.optimizer, DmuonOptimizer)
    dmuon.dedicate_params(
        model,
        mesh["shard"],
        is_managed,
        replicate_mesh=mesh["replicate"] if spec.mesh.replicate > 1 else None,
        **runtime_arguments(spec, model),
    )
    muon, adamw = spec.optimizer.muon, spec.optimizer.adamw
    optimizer = dmuon.Muon(
        model,
        lr=muon.lr,
        momentum=muon.momentum,
        weight_decay=muon.weight_decay,
        nesterov=muon.nesterov,
        ns_steps=muon.ns_steps,
        ns_backend=switch.newton_schulz,
        scale=muon.scale,
        adamw_lr=adamw.lr,
        adamw_betas=adamw.betas,
        adamw_eps=adamw.eps,
        adamw_weight_decay=adamw.weight_decay,
        non_finite=spec.failure.non_finite,
    )
    return DmuonDriver(model, optimizer)


def baseline_driver(spec: JobSpec, model: nn.Module, mesh: DeviceMesh, device: torch.device) -> BaselineDriver:
    """Shard or replicate ``model`` and make its optimizers; ``mesh`` as for :func:`dmuon_driver`. Collective.

    With shards the model is under FSDP2 (on a grid of both axes where there are replicas too), with replicas alone
    under DDP, and on one worker as it is.
    """
    half = spec.training.precision == "bfloat16"
    config = baseline_config(spec.optimizer)
    if spec.mesh.shard > 1:
        trained = _shard(spec, model, mesh if spec.mesh.replicate > 1 else mesh["shard"], half)
        half = False  # FSDP2 casts the parameters themselves
    elif spec.mesh.replicate > 1:
        trained = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    else:
        trained = model
    optimizer = Tandem(trained, dmuon.build_optimizers(model, config), non_finite=spec.failure.non_finite)
    return BaselineDriver(trained, optimizer, device, torch.bfloat16 if half else None)


def _shard(spec: JobSpec, model: nn.Module, mesh: DeviceMesh, half: bool) -> nn.Module:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    reshard, modules = spec.mesh.reshard_after_forward, dict(model.named_modules())
    for name in reversed(shard_units(spec, model)):  # an inner one first
        fully_shard(modules[name], mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
    return model


def shard_units(spec: JobSpec, model: nn.Module) -> list[str]:
    """Return the modules that FSDP2 gathers one by one, outer ones first; what is in none goes with the whole model.

    They are the spec's hook boundaries, or the members of lists called ``layers``, ``blocks`` or ``h``.
    """
    chosen = hook_boundaries(spec, model)
    if chosen is not None:
        return [name for name, module in model.named_modules() if name and chosen(module)]
    return [name for name, _ in model.named_modules() if re.search(r"(^|\.)(layers|blocks|h)\.\d+$", name)]
