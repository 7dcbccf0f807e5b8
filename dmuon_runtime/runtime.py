"""What a dedicated model carries: its plan, transport, units and schedule, found again by the model object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from dmuon_runtime.counters import Counters
from dmuon_runtime.errors import NotDedicated
from dmuon_runtime.hooks import BackwardWatch
from dmuon_runtime.plan import RuntimePlan
from dmuon_runtime.schedule import Schedule
from dmuon_runtime.transport import Transport

__all__ = ["Runtime", "find_runtime", "get_counters", "get_plan", "no_sync", "register_runtime"]


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


_RUNTIMES: WeakKeyDictionary[nn.Module, Runtime] = WeakKeyDictionary()


def register_runtime(model: nn.Module, runtime: Runtime) -> None:
    """Remember the runtime of ``model``."""
    _RUNTIMES[model] = runtime


def has_runtime(model: nn.Module) -> bool:
    """Tell whether ``model`` was dedicated."""
    return model in _RUNTIMES


def find_runtime(model: nn.Module) -> Runtime:
    """Return the runtime of ``model``; raises :class:`NotDedicated`."""
    runtime = _RUNTIMES.get(model)
    if runtime is None:
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
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards keep their gradients local; the first backward after it, or the step, reduces the sum. Nests."""
    schedule = find_runtime(model).schedule
    schedule.no_sync_depth += 1
    try:
        yield
    finally:
        schedule.no_sync_depth -= 1
