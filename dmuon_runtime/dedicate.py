"""The entry to the runtime: plan, agree on the plan across ranks, then take the parameters over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon_runtime.boundary import BoundaryPredicate
from dmuon_runtime.buckets import Bucket
from dmuon_runtime.counters import Counters
from dmuon_runtime.errors import AlreadyDedicated, DMuonError, PlanMismatch, SettingError, UnsupportedFeature
from dmuon_runtime.hooks import install_hooks
from dmuon_runtime.partition import CostModel, OwnerStrategy
from dmuon_runtime.plan import RuntimePlan
from dmuon_runtime.planning import PlanOptions, Predicate, ProcessGroupPolicy, build_plan
from dmuon_runtime.policy import RouteHintFn
from dmuon_runtime.runtime import Runtime, has_runtime, register_runtime
from dmuon_runtime.schedule import Schedule
from dmuon_runtime.transport import Transport
from dmuon_runtime.unit import Unit

__all__ = ["dedicate_params", "plan_params"]


def plan_params(
    model: nn.Module,
    world_size: int,
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
) -> RuntimePlan:
    """Return the plan that :func:`dedicate_params` with the same arguments would follow on ``world_size`` ranks.

    Pure: reads names, shapes and dtypes only, so a model on the meta device will do. Raises the same errors.
    """
    _refuse_replicas(replicate_mesh)
    options = PlanOptions(
        param_policy, storage, reshard_after_forward, hook_boundary_predicate, hook_boundary_strict, route_hint_fn,
        strict_routes, owner_strategy, owner_cost_model, process_group_policy,
    )  # fmt: skip
    return build_plan(model, world_size, predicate, options)


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
) -> dict[nn.Parameter, int]:
    """Give every chosen parameter of ``model`` to the runtime; collective over ``mesh`` (1-D).

    The parameter objects stay in their modules; between uses their storage is empty. The weights that count are the
    owner's (or, for ``sharded_adamw``, each rank's part), so initialise all ranks alike. Returns the owner rank by
    parameter; a ``sharded_adamw`` parameter, which all ranks own, is given rank -1. Raises a :class:`DMuonError` on
    every rank, before anything is changed, when the plan is refused or the ranks' plans differ.
    """
    counters = Counters()
    transport = Transport(mesh, process_group_policy, counters)
    make_options = partial(
        PlanOptions,
        param_policy, storage, reshard_after_forward, hook_boundary_predicate, hook_boundary_strict, route_hint_fn,
        strict_routes, owner_strategy, owner_cost_model, process_group_policy,
    )  # fmt: skip

    def make_plan() -> RuntimePlan:
        _refuse_second(model)
        _refuse_replicas(replicate_mesh)
        return build_plan(model, transport.world_size, predicate, make_options())

    plan = _agree_on_plan(make_plan, transport)
    runtime = _take_over(model, plan, transport, counters)
    register_runtime(model, runtime)
    return {
        parameter: -1 if entry.owner is None else entry.owner
        for parameter, entry in zip(runtime.parameters, plan.parameters, strict=True)
    }


def _refuse_replicas(replicate_mesh: DeviceMesh | None) -> None:
    if replicate_mesh is not None:
        raise UnsupportedFeature(
            "replicate_mesh is not available yet; put all ranks on the one shard mesh (world ranks on a 1-D mesh)"
        )


def _refuse_second(model: nn.Module) -> None:
    taken = [name for name, module in model.named_modules() if has_runtime(module)]
    if taken:
        where = ", ".join(name or "the model itself" for name in taken)
        raise AlreadyDedicated(
            f"already under the runtime: {where}; call dedicate_params once, on the whole model", taken
        )


def _agree_on_plan(make_plan: Callable[[], RuntimePlan], transport: Transport) -> RuntimePlan:
    """Plan, and compare with all ranks before any collective that depends on the plan; a refusal stops every rank."""
    refusal: DMuonError | None = None
    try:
        plan = make_plan()
        answer = plan.hash
    except DMuonError as error:
        refusal, answer = error, f"refused: {error}"
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
