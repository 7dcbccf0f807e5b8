"""What a dedicated model carries: its plan, transport, units and schedule."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dmuon_runtime.counters import Counters
from dmuon_runtime.errors import AlreadyOptimized, NotDedicated, PeerFailed, UnsupportedFeature
from dmuon_runtime.hooks import BackwardWatch
from dmuon_runtime.plan import RuntimePlan
from dmuon_runtime.schedule import Schedule
from dmuon_runtime.transport import Transport

__all__ = [
    "Runtime",
    "clear_with",
    "fail_together",
    "find_runtime",
    "get_counters",
    "get_plan",
    "inner_model",
    "names_under_a_runtime",
    "no_sync",
    "register_runtime",
]


@dataclass(frozen=True)
class Runtime:
    """Everything of one dedicated model on this rank."""

    plan: RuntimePlan
    parameters: tuple[nn.Parameter, ...]
    """The plan's parameters, in its order."""
    transport: Transport
    counters: Counters
    schedule: Schedule
    watch: BackwardWatch
    optimizers: WeakSet[torch.optim.Optimizer] = field(default_factory=WeakSet, compare=False, repr=False)
    """The Muon that trains it, while somebody holds it."""

    def refuse_second_optimizer(self) -> None:
        """Raise :class:`AlreadyOptimized` where a Muon of this model is alive, and could still step."""
        if self.optimizers:
            gc.collect()  # one that nobody holds may wait for its cycles to be found
        if self.optimizers:
            raise AlreadyOptimized(
                "the model has a Muon already, and two would update the same weights with states of their own; go on "
                "with that one (its param_groups hold the rates), or let it go before another is built: del optimizer, "
                "and what refers to it, such as a scheduler, a kept exception or a notebook's output"
            )


_ATTRIBUTE = "_dmuon_runtime"
_MODELS: WeakSet[nn.Module] = WeakSet()
"""Dedicated models that are alive. The runtime hangs on its model, not on this set, so that both can be collected."""


def register_runtime(model: nn.Module, runtime: Runtime) -> None:
    """Remember the runtime of ``model``."""
    setattr(model, _ATTRIBUTE, runtime)
    _MODELS.add(model)
    clear_with(model, runtime)
    if runtime.plan.storage == "sharded":
        model.register_state_dict_pre_hook(_refuse_saving)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_refuse_loading)  # type: ignore[no-untyped-call]
    for module in (model, *(unit.module for unit in runtime.schedule.units)):
        object.__setattr__(module, "__deepcopy__", _refuse_copying)


def clear_with(model: nn.Module, runtime: Runtime) -> None:
    """Make ``model.zero_grad()`` clear what the runtime has reduced too, as it does in torch."""
    plain = model.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        plain(set_to_none)
        runtime.watch.note_outside()
        runtime.schedule.zero_grad()

    object.__setattr__(model, "zero_grad", zero_grad)


def _refuse_saving(_model: nn.Module, _prefix: str, keep_vars: bool) -> None:
    """Between uses parameters read as NaN; with ``keep_vars`` nobody wants their values."""
    if not keep_vars:
        raise UnsupportedFeature(
            "model.state_dict() of a dedicated model would hold NaN: the weights are with their owners; use "
            "dmuon.get_model_state_dict(model), on all ranks"
        )


def _refuse_loading(_model: nn.Module, *_rest: object) -> None:
    raise UnsupportedFeature(
        "model.load_state_dict() cannot reach the weights of a dedicated model, which are with their owners; use "
        "dmuon.set_model_state_dict(model, state), on all ranks, or load before dedicate_params"
    )


def _refuse_copying(_memo: object) -> None:
    raise UnsupportedFeature(
        "copy.deepcopy of a dedicated model, or of a part of it, would copy neither process groups nor weights, "
        "which are with their owners; copy before dedicate_params, or build another model and load "
        "dmuon.get_model_state_dict(model) into it, on all ranks"
    )


def names_under_a_runtime(model: nn.Module) -> list[str]:
    """Return names of the parameters of ``model`` that a runtime already has, under this or another model."""
    taken = {id(parameter) for other in _MODELS for parameter in find_runtime(other).parameters}
    return [name for name, parameter in model.named_parameters() if id(parameter) in taken]


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model that DDP wraps, or the model."""
    return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model


def find_runtime(model: nn.Module) -> Runtime:
    """Return the runtime of ``model``, also through DDP; raises :class:`NotDedicated`."""
    runtime = getattr(inner_model(model), _ATTRIBUTE, None)
    if not isinstance(runtime, Runtime):
        raise NotDedicated(
            f"{type(model).__name__} is not under the runtime; call dedicate_params(model, mesh, predicate) on this "
            "very object first (not on a part or a copy of it)"
        )
    return runtime


def get_plan(model: nn.Module) -> RuntimePlan:
    """Return the plan that all ranks of a dedicated ``model`` follow."""
    return find_runtime(model).plan


def get_counters(model: nn.Module) -> Counters:
    """Return the counters of a dedicated ``model`` on this rank."""
    return find_runtime(model).counters


@contextmanager
def fail_together(model: nn.Module) -> Iterator[None]:
    """When one rank raises in here, the others raise :class:`PeerFailed` when they next meet it.

    Without it they wait for that rank's collectives until the group's timeout. It helps with errors of the caller's
    own code in a forward or backward; collectives of FSDP2, DDP or the caller, and updates begun, it cannot end.
    """
    runtime = find_runtime(model)
    try:
        yield
    except PeerFailed:
        raise
    except Exception as error:
        runtime.watch.note_outside()
        with suppress(RuntimeError):  # a broken connection tells the others by itself
            runtime.schedule.announce_failure(f"{type(error).__name__}: {error}")
        raise


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards keep their gradients local; the first backward after it, or the step, reduces the sum. Nests.

    In hybrid mode FSDP2's and DDP's parameters do the same (give the DDP wrapper as ``model``), but these two reduce in
    a backward only: the last one before a step must be outside.
    """
    schedule = find_runtime(model).schedule
    schedule.no_sync_depth += 1
    outermost = schedule.no_sync_depth == 1
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)] if outermost else []
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        try:
            for module in sharded:
                module.set_requires_gradient_sync(False, recurse=False)
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)
            schedule.no_sync_depth -= 1
