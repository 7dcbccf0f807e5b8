"""Hybrid mode: parameters that train in the same model but are kept, gathered and reduced by FSDP2 or DDP.

Order of calls: ``dedicate_params``; then ``fully_shard(..., ignored_params=ignored_params(model))`` for each module, or
``ignore_in_ddp(model)`` and DDP around the model; then ``Muon``. The optimizer updates guests by AdamW where they are:
a DTensor's local shard, or the whole parameter on every rank. Nothing of torch is patched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon_runtime.errors import MeshError, ParametersChanged, UnmanagedParameters
from dmuon_runtime.runtime import Runtime, find_runtime, inner_model

__all__ = ["Guest", "find_guests", "ignore_in_ddp", "ignored_params", "local_part"]


def ignored_params(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that the runtime has taken, for ``fully_shard(..., ignored_params=...)``."""
    return set(find_runtime(model).parameters)


def ignore_in_ddp(model: nn.Module) -> None:
    """Tell DDP, which is going to wrap ``model``, to leave alone what the runtime has taken."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, _ddp_names(find_runtime(model)))  # type: ignore[no-untyped-call]


def _ddp_names(runtime: Runtime) -> list[str]:
    """Return every name by which DDP may look a parameter up: it puts a dot before those of the root module."""
    names = [name for entry in runtime.plan.parameters for name in (entry.name, *entry.aliases)]
    return [*names, *(f".{name}" for name in names if "." not in name)]


@dataclass(frozen=True)
class Guest:
    """One parameter that another runtime keeps; updated here where this rank has a part of it."""

    name: str
    parameter: nn.Parameter
    manager: Literal["fsdp2", "ddp"]
    counts_here: bool
    """True on one rank for each element: replicas are counted once in norms."""

    @property
    def master(self) -> Tensor:
        """This rank's part of the weights, itself."""
        return local_part(self.parameter).detach()  # in this order: detaching a DTensor takes five times as long

    @property
    def has_gradient(self) -> bool:
        """Tell whether its runtime left a gradient, and this rank has a part of it."""
        return self.parameter.grad is not None and self.master.numel() > 0

    @property
    def gradient(self) -> Tensor:
        """This rank's part of the mean gradient over ranks."""
        assert self.parameter.grad is not None, f"{self.name} has no gradient"
        return local_part(self.parameter.grad)

    def make_state(self) -> dict[str, Tensor]:
        """Return zeroed AdamW state, laid out as the parameter is."""
        zeros = torch.zeros_like(self.parameter.detach())
        step = torch.zeros((), dtype=torch.float32, device=self.master.device)
        return {"step": step, "exp_avg": zeros, "exp_avg_sq": torch.zeros_like(zeros)}


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def find_guests(model: nn.Module, runtime: Runtime) -> list[Guest]:
    """Return what trains under FSDP2 or DDP, in the model's order.

    Raises :class:`ParametersChanged` when the runtime's parameters are no longer the model's, or DDP has them too,
    :class:`UnmanagedParameters` for what nobody would update, :class:`MeshError` for a DTensor on other ranks.
    """
    inner = inner_model(model)
    named = dict(inner.named_parameters())
    _check_own(named, model, runtime)
    own = {id(parameter) for parameter in runtime.parameters}
    others = {
        name: parameter
        for name, parameter in named.items()
        if parameter.requires_grad and parameter.numel() > 0 and id(parameter) not in own
    }
    in_ddp = isinstance(model, DistributedDataParallel)
    ignored = set(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
    loose = [
        name
        for name, parameter in others.items()
        if not isinstance(parameter, DTensor) and (not in_ddp or name in ignored)
    ]
    if loose:
        raise _unmanaged(loose, runtime)
    _check_meshes(others, runtime)
    return [
        Guest(name, parameter, "fsdp2" if isinstance(parameter, DTensor) else "ddp", _counts_here(parameter, runtime))
        for name, parameter in others.items()
    ]


def _check_own(named: dict[str, nn.Parameter], model: nn.Module, runtime: Runtime) -> None:
    changed = [
        entry.name
        for entry, parameter in zip(runtime.plan.parameters, runtime.parameters, strict=True)
        if named.get(entry.name) is not parameter or tuple(parameter.shape) != entry.shape
    ]
    if changed:
        raise ParametersChanged(
            f"no longer what dedicate_params took: {', '.join(changed)}. If fully_shard took them, pass "
            "ignored_params=ignored_params(model) to each call; otherwise replace parameters before dedicate_params",
            changed,
        )
    ignored = set(getattr(inner_model(model), "_ddp_params_and_buffers_to_ignore", ()))
    twice = [entry.name for entry in runtime.plan.parameters if entry.name not in ignored]
    if isinstance(model, DistributedDataParallel) and twice:
        raise ParametersChanged(
            f"DDP reduces them as well: {', '.join(twice)}; call ignore_in_ddp(model) before DDP wraps it", twice
        )


def _unmanaged(names: Sequence[str], runtime: Runtime) -> UnmanagedParameters:
    left = [name for name in names if name in runtime.plan.guests]
    late = [name for name in names if name not in runtime.plan.guests]
    parts: list[str] = []
    if left:
        parts.append(
            f"nobody would update {', '.join(left)}: the predicate leaves them out, and neither FSDP2 nor DDP has them."
            " Widen the predicate, call fully_shard(..., ignored_params=ignored_params(model)), give Muon the DDP "
            "wrapper, or freeze them with requires_grad_(False)"
        )
    if late:
        parts.append(
            f"nobody would update {', '.join(late)}: they train, but did not when the model was dedicated. Unfreeze "
            "them before dedicate_params, or freeze them again"
        )
    return UnmanagedParameters("; ".join(parts), names)


def _check_meshes(others: dict[str, nn.Parameter], runtime: Runtime) -> None:
    wrong = [
        f"{name} (ranks {ranks})"
        for name, parameter in others.items()
        if isinstance(parameter, DTensor)
        and sorted(ranks := parameter.device_mesh.mesh.flatten().tolist()) != sorted(runtime.transport.ranks)
    ]
    if wrong:
        raise MeshError(
            f"one optimizer steps on one set of ranks, here {sorted(runtime.transport.ranks)}, but FSDP2 shards over "
            f"others: {', '.join(wrong)}; use one mesh for both",
            wrong,
        )


def _counts_here(parameter: nn.Parameter, runtime: Runtime) -> bool:
    if not isinstance(parameter, DTensor):
        return runtime.transport.rank == 0
    place = parameter.device_mesh.get_coordinate()
    assert place is not None, "this rank is on the mesh"
    return all(place[axis] == 0 for axis, kind in enumerate(parameter.placements) if kind.is_replicate())
