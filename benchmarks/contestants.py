"""What the step benchmarks compare: FSDP2 with torch's optimizers, and the runtime, on one model and mesh."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import dmuon_runtime as dmuon

__all__ = ["BUILDERS", "Contestant"]

LR, ADAMW_LR, WEIGHT_DECAY = 0.01, 3e-4, 0.01


@dataclass(slots=True)
class Contestant:
    """A model that trains: ``optimizers`` are stepped one after the other."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    counted: bool = False
    """True where the runtime counts its communication."""
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext
    """What surrounds ``forward``, ``backward`` and ``update``: nothing, or a range of a trace of that name."""

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """Return the loss of int64 [batch, sequence], after the backward pass."""
        with self.phase("forward"):
            logits = self.model(input_ids=tokens).logits
            targets = tokens.roll(-1, dims=1)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        with self.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        """Step and clear every optimizer."""
        with self.phase("update"):
            for optimizer in self.optimizers:
                optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name


def _shard(model: nn.Module, mesh: Any, reshard: bool, dtype: torch.dtype, ignored: set[nn.Parameter]) -> None:
    """Shard each layer and the model; beside the runtime, which leaves two gains of a layer, the model alone.

    A group of FSDP2 for each layer costs the host its hooks, however little is in it: docs/rooms/dmuon_runtime.md.
    """
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    if ignored:
        settings["ignored_params"] = ignored
    for layer in () if ignored else model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **settings)  # type: ignore[arg-type]
    fully_shard(model, **settings)


def fsdp_adamw(model: nn.Module, grid: DeviceMesh, reshard: bool, dtype: torch.dtype) -> Contestant:
    """FSDP2 with fused AdamW for everything."""
    _shard(model, _mesh_of(grid), reshard, dtype, set())
    return Contestant(model, [torch.optim.AdamW(model.parameters(), ADAMW_LR, weight_decay=WEIGHT_DECAY, fused=True)])


def fsdp_muon(model: nn.Module, grid: DeviceMesh, reshard: bool, dtype: torch.dtype) -> Contestant:
    """FSDP2 with torch.optim.Muon on the DTensors of matrices, and fused AdamW for the rest."""
    _shard(model, _mesh_of(grid), reshard, dtype, set())
    named = dict(model.named_parameters())
    matrices = [parameter for name, parameter in named.items() if _is_matrix(name, parameter)]
    others = [parameter for name, parameter in named.items() if not _is_matrix(name, parameter)]
    muon = torch.optim.Muon(matrices, LR, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return Contestant(model, [muon, torch.optim.AdamW(others, ADAMW_LR, weight_decay=WEIGHT_DECAY, fused=True)])


def ours_pure(model: nn.Module, grid: DeviceMesh, reshard: bool, dtype: torch.dtype) -> Contestant:
    """The runtime for every parameter."""
    return _dedicated(model, grid, reshard, dtype, lambda name, parameter: parameter.requires_grad)


def ours_hybrid(model: nn.Module, grid: DeviceMesh, reshard: bool, dtype: torch.dtype) -> Contestant:
    """The runtime for matrices, FSDP2 for the rest."""
    return _dedicated(model, grid, reshard, dtype, _is_matrix)


def _dedicated(
    model: nn.Module,
    grid: DeviceMesh,
    reshard: bool,
    dtype: torch.dtype,
    predicate: Callable[[str, nn.Parameter], bool],
) -> Contestant:
    hybrid = predicate is _is_matrix
    with_replicas = grid.ndim == 2 and grid.size(0) > 1
    overrides = [
        {"name": ["norm"], "set": {"route": "adamw"}},
        {"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}},
    ]
    defaults = {"route": "muon", "param_dtype": dtype, "grad_dtype": torch.float32}
    dmuon.dedicate_params(
        model,
        grid["shard"],
        predicate,
        replicate_mesh=grid["replicate"] if with_replicas else None,
        reshard_after_forward=reshard,
        param_policy={"defaults": defaults, "overrides": [] if hybrid else overrides},
    )
    if hybrid:
        _shard(model, _mesh_of(grid), reshard, dtype, dmuon.ignored_params(model))
    optimizer = dmuon.Muon(
        model,
        LR,
        weight_decay=WEIGHT_DECAY,
        adamw_lr=ADAMW_LR,
        adamw_weight_decay=WEIGHT_DECAY,
        adamw_betas=(0.9, 0.999),
    )
    return Contestant(model, [optimizer], counted=True)


def public_dmuon(model: nn.Module, grid: DeviceMesh, reshard: bool, dtype: torch.dtype) -> Contestant:
    """The public dmuon package (X-Square-Robot) for matrices, FSDP2 for the rest: its defaults, our dtypes and rates.

    It patches FSDP2 when it is imported, so that what it owns is left to it.
    """
    public = import_module("dmuon")
    public.dedicate_params(
        model,
        grid["shard"],
        _is_matrix,
        replicate_mesh=grid["replicate"] if grid.size(0) > 1 else None,
        reshard_after_forward=reshard,
        param_policy={"defaults": {"param_dtype": dtype, "grad_dtype": torch.float32}},
    )
    _shard(model, _mesh_of(grid), reshard, dtype, set())
    rates = {"adamw_lr": ADAMW_LR, "adamw_weight_decay": WEIGHT_DECAY}
    return Contestant(model, [public.Muon(model, LR, weight_decay=WEIGHT_DECAY, **rates)])


def _mesh_of(grid: DeviceMesh) -> DeviceMesh:
    return grid if grid.size(0) > 1 else grid["shard"]


Builder = Callable[[nn.Module, DeviceMesh, bool, torch.dtype], Contestant]
BUILDERS: dict[str, Builder] = {
    "fsdp2 + adamw": fsdp_adamw, "fsdp2 + torch muon": fsdp_muon, "ours pure": ours_pure, "ours hybrid": ours_hybrid,
}  # fmt: skip
if importlib.util.find_spec("dmuon") is not None:  # never a dependency
    BUILDERS["public dmuon"] = public_dmuon
