"""The entry to the runtime: plan, agree on the plan across ranks, then take the parameters over."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmuon_runtime.boundary import BoundaryPredicate
from dmuon_runtime.buckets import Bucket
from dmuon_runtime.counters import Counters
from dmuon_runtime.errors import AlreadyDedicated, AlreadySharded, DMuonError, PlanMismatch, SettingError
from dmuon_runtime.hooks import install_hooks
from dmuon_runtime.partition import CostModel, OwnerStrategy
from dmuon_runtime.plan import RuntimePlan
from dmuon_runtime.planning import PlanOptions, Predicate, ProcessGroupPolicy, build_plan, check_model
from dmuon_runtime.policy import RouteHintFn
from dmuon_runtime.process_groups import open_grid
from dmuon_runtime.runtime import Runtime, names_under_a_runtime, register_runtime
from dmuon_runtime.schedule import Schedule
from dmuon_runtime.transport import Transport
from dmuon_runtime.unit import Unit

__all__ = ["Owner", "dedicate_params", "plan_params"]

_log = logging.getLogger(__name__)


Owner = int | tuple[int, int]
"""A shard rank; with a replicate mesh, a shard and a replicate rank. -1 stands for all."""


def plan_params(
    model: nn.Module,
    mesh_shape: int | tuple[int, int],
    predicate: Predicate,
    *,
    param_policy: Mapping[str, object] | None = None,
    storage: str = "sharded",
    reshard_after_forward: bool = True,
    hook_boundary_predicate: BoundaryPredicate | None = None,
    hook_boundary_strict: bool = True,
    route_hint_fn: RouteHintFn | None = None,
    strict_routes: bool = True,
    owner_strategy: OwnerStrategy = "lpt",
    owner_cost_model: CostModel = "ns_flops",
    process_group_policy: ProcessGroupPolicy = "isolated",
    publish_dtype: torch.dtype | str | None = None,
) -> RuntimePlan:
    """Return the plan that :func:`dedicate_params` with the same arguments would follow on a mesh of that shape.

    ``mesh_shape`` is the size of the shard axis, or of the replicate and the shard axis. Pure: reads names, shapes and
    dtypes only, so a model on the meta device will do. Raises the same errors.
    """
    shape = (1, mesh_shape) if isinstance(mesh_shape, int) else mesh_shape
    options = PlanOptions(
        param_policy, storage, reshard_after_forward, hook_boundary_predicate, hook_boundary_strict, route_hint_fn,
        strict_routes, owner_strategy, owner_cost_model, process_group_policy, publish_dtype,
    )  # fmt: skip
    return build_plan(model, shape, predicate, options)


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate,
    *,
    param_policy: Mapping[str, object] | None = None,
    replicate_mesh: DeviceMesh | None = None,
    storage: str = "sharded",
    reshard_after_forward: bool = True,
    hook_boundary_predicate: BoundaryPredicate | None = None,
    hook_boundary_strict: bool = True,
    route_hint_fn: RouteHintFn | None = None,
    strict_routes: bool = True,
    owner_strategy: OwnerStrategy = "lpt",
    owner_cost_model: CostModel = "ns_flops",
    process_group_policy: ProcessGroupPolicy = "isolated",
    publish_dtype: torch.dtype | str | None = None,
) -> dict[nn.Parameter, Owner]:
    """Give every chosen parameter of ``model`` to the runtime; collective over ``mesh`` and ``replicate_mesh`` (1-D).

    The parameter objects stay in their modules; between uses their storage is empty (not with
    ``storage="replicated"``). The weights that count are the owner's (or, for ``sharded_adamw``, each rank's part), so
    initialise all ranks alike. What trains and is not chosen must be given to ``fully_shard`` or DDP, afterwards.

    Returns the owner by parameter: its rank on ``mesh``, with ``replicate_mesh`` its (shard, replicate) ranks; -1 where
    all ranks own a part. Raises a :class:`DMuonError` on every rank, before anything is changed, when the plan is
    refused or the ranks' plans differ.
    """
    counters = Counters()
    transport = Transport(open_grid(mesh, replicate_mesh, process_group_policy), counters)
    make_options = partial(
        PlanOptions,
        param_policy, storage, reshard_after_forward, hook_boundary_predicate, hook_boundary_strict, route_hint_fn,
        strict_routes, owner_strategy, owner_cost_model, process_group_policy, publish_dtype,
    )  # fmt: skip

    def make_plan() -> RuntimePlan:
        _refuse_second(model)
        return build_plan(model, transport.mesh_shape, predicate, make_options())

    plan = _agree_on_plan(make_plan, transport)
    for warning in plan.warnings if transport.rank == 0 else ():
        _log.warning("plan %s: %s", plan.hash[:12], warning)
    runtime = _take_over(model, plan, transport, counters)
    register_runtime(model, runtime)
    return {
        parameter: _owner(plan, entry.owner, replicate_mesh is not None)
        for parameter, entry in zip(runtime.parameters, plan.parameters, strict=True)
    }


def _owner(plan: RuntimePlan, owner: int | None, with_replicas: bool) -> Owner:
    place = (-1, -1) if owner is None else plan.place(owner)
    return place if with_replicas else place[0]


def _refuse_second(model: nn.Module) -> None:
    check_model(model)
    if isinstance(model, DistributedDataParallel):
        raise AlreadySharded(
            "the model is already under DDP, which has taken its parameters; call dedicate_params on the model first, "
            "tell DDP what to ignore (ignored_param_names), and wrap it then"
        )
    taken = names_under_a_runtime(model)
    if taken:
        where = ", ".join(taken)
        raise AlreadyDedicated(
            f"already under the runtime: {where}; call dedicate_params once, on the whole model", taken
        )


def _agree_on_plan(make_plan: Callable[[], RuntimePlan], transport: Transport) -> RuntimePlan:
    """Plan, and compare with all ranks before any collective that depends on the plan; a refusal stops every rank."""
    refusal: Exception | None = None
    try:
        plan = make_plan()
        answer = plan.hash
    except DMuonError as error:
        refusal, answer = error, f"refused: {error}"
    except Exception as error:  # of a predicate or another function of the caller's: raised below, told to all first
        refusal, answer = error, f"refused: {type(error).__name__}: {error}"
    answers = transport.gather_texts(answer)
    if refusal is not None:
        raise refusal
    refused = [f"rank {rank} {text}" for rank, text in enumerate(answers) if text.startswith("refused: ")]
    if refused:
        raise PlanMismatch(
            f"this rank has a plan, but {'; '.join(refused)}; build the same model on every rank", refused
        )
    if len(set(answers)) > 1:
        raise _describe_mismatch(plan, answers, transport)
    return plan


def _describe_mismatch(plan: RuntimePlan, hashes: Sequence[str], transport: Transport) -> PlanMismatch:
    mine = json.dumps({entry.name: repr(entry) for entry in plan.parameters})
    described: list[dict[str, str]] = [json.loads(text) for text in transport.gather_texts(mine)]
    names = sorted({name for entries in described for name in entries})
    differing = [name for name in names if len({entries.get(name) for entries in described}) > 1]
    groups: dict[str, list[int]] = {}
    for rank, digest in enumerate(hashes):
        groups.setdefault(digest, []).append(rank)
    who = "; ".join(f"ranks {ranks} have {digest[:12]}" for digest, ranks in groups.items())
    what = f"parameters {', '.join(differing)}" if differing else "options outside the parameters"
    return PlanMismatch(
        f"ranks made different plans ({who}); they differ in {what}; build the same model and pass the same arguments "
        "on every rank",
        differing,
    )


def _take_over(model: nn.Module, plan: RuntimePlan, transport: Transport, counters: Counters) -> Runtime:
    by_name = dict(model.named_parameters())
    parameters = tuple(by_name[entry.name] for entry in plan.parameters)
    _check_devices(plan, parameters, transport.device)
    modules = dict(model.named_modules())
    units = [
        Unit(
            index,
            entry,
            modules[entry.name],
            [Bucket(b, [parameters[i] for i in b.parameters], plan, transport) for b in entry.buckets],
        )
        for index, entry in enumerate(plan.units)
    ]
    schedule = Schedule(units, plan.backward_order, plan.reshard_after_forward, transport)
    return Runtime(plan, parameters, transport, counters, schedule, install_hooks(schedule))


def _check_devices(plan: RuntimePlan, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    wrong = [
        f"{entry.name} ({parameter.device})"
        for entry, parameter in zip(plan.parameters, parameters, strict=True)
        if parameter.device.type != device.type
    ]
    if wrong:
        raise SettingError(f"parameters must be on {device}, the mesh's device: {', '.join(wrong)}", wrong)
