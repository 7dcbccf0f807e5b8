"""From a model's names and shapes to a :class:`RuntimePlan`. Pure: meta tensors and a mesh shape suffice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon_runtime.boundary import Boundaries, BoundaryPredicate, ModuleTree, NamedParameter
from dmuon_runtime.errors import (
    AlreadySharded,
    DtypeConflict,
    MeshError,
    NothingMatched,
    PolicyError,
    SettingError,
)
from dmuon_runtime.matrices import matrix_shapes
from dmuon_runtime.partition import CostModel, OwnerStrategy, WorkItem, assign_owners, owner_cost
from dmuon_runtime.plan import BucketPlan, ParameterPlan, RuntimePlan, UnitPlan
from dmuon_runtime.policy import (
    DTYPE_NAMES,
    ParamPolicy,
    PolicyFields,
    RouteHintFn,
    dtype_name,
    parse_dtype,
    parse_param_policy,
    resolve_policy,
)
from dmuon_runtime.strictness import check_routes, check_views, view_warnings

__all__ = ["PlanOptions", "Predicate", "ProcessGroupPolicy", "build_plan", "check_model"]

Predicate = Callable[[str, nn.Parameter], bool]
ProcessGroupPolicy = Literal["isolated", "shared"]
FORMAT_VERSION = 2
_ALIGN_BYTES = 16


@dataclass(frozen=True)
class PlanOptions:
    """Every option of a plan; checked on construction."""

    param_policy: Mapping[str, object] | None = None
    storage: str = "sharded"
    reshard_after_forward: bool = True
    hook_boundary_predicate: BoundaryPredicate | None = None
    hook_boundary_strict: bool = True
    route_hint_fn: RouteHintFn | None = None
    strict_routes: bool = True
    owner_strategy: OwnerStrategy = "lpt"
    owner_cost_model: CostModel = "ns_flops"
    process_group_policy: ProcessGroupPolicy = "isolated"
    publish_dtype: torch.dtype | str | None = None
    """Of new weights on their way to other replicas; None is each parameter's ``param_dtype``."""

    def __post_init__(self) -> None:
        choices = (
            ("storage", self.storage, ("sharded", "replicated")),
            ("owner_strategy", self.owner_strategy, get_args(OwnerStrategy)),
            ("owner_cost_model", self.owner_cost_model, get_args(CostModel)),
            ("process_group_policy", self.process_group_policy, get_args(ProcessGroupPolicy)),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                raise SettingError(f"{name} {value!r} is unknown; use one of {', '.join(allowed)}")
        for name in ("reshard_after_forward", "hook_boundary_strict", "strict_routes"):
            if not isinstance(getattr(self, name), bool):
                raise SettingError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in ("hook_boundary_predicate", "route_hint_fn"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise SettingError(f"{name} must be a function, not {getattr(self, name)!r}")
        if self.param_policy is not None and self.route_hint_fn is not None:
            raise PolicyError("param_policy and route_hint_fn both set routes; keep param_policy")
        parse_dtype(self.publish_dtype)


def build_plan(
    model: nn.Module, mesh_shape: tuple[int, int], predicate: Predicate, options: PlanOptions
) -> RuntimePlan:
    """Return the plan for ``mesh_shape`` (replicate, shard), or raise the :class:`DMuonError` that says why not."""
    _check_mesh_shape(mesh_shape, options)
    check_model(model)
    if not callable(predicate):
        raise SettingError(f"predicate must be a function of a name and a parameter, not {predicate!r}")
    world_size = math.prod(mesh_shape)
    policy = parse_param_policy(options.param_policy)
    tree = ModuleTree(model)
    chosen, frozen, guests, warnings = _select(tree, predicate)
    _refuse_sharded(chosen)
    policies = {e.name: resolve_policy(e.names, e.parameter, policy, options.route_hint_fn) for e in chosen}
    if options.strict_routes:
        check_routes(chosen, policies, tree)
    check_views(chosen, policies)
    boundaries = Boundaries(tree, options.hook_boundary_predicate, options.hook_boundary_strict).choose(chosen)
    parameters = _parameter_plans(chosen, policies, boundaries, world_size, options)
    names = sorted(set(boundaries.values()), key=tree.position.__getitem__)
    members: dict[str, list[int]] = {name: [] for name in names}
    for index, plan in enumerate(parameters):
        members[plan.unit].append(index)
    layout = _Layout(mesh_shape[1], parse_dtype(options.publish_dtype))
    units = tuple(_unit_plan(i, name, members[name], parameters, layout) for i, name in enumerate(names))
    return RuntimePlan(
        format_version=FORMAT_VERSION,
        world_size=world_size,
        mesh_shape=mesh_shape,
        reshard_after_forward=options.reshard_after_forward and options.storage == "sharded",
        storage=options.storage,
        process_group_policy=options.process_group_policy,
        owner_strategy=options.owner_strategy,
        owner_cost_model=options.owner_cost_model,
        parameters=parameters,
        units=units,
        backward_order=_backward_order(names, tree),
        frozen=tuple(frozen),
        guests=tuple(guests),
        warnings=(*warnings, *_policy_warnings(policy, chosen), *view_warnings(chosen, policies, tree)),
    )


def check_model(model: object) -> None:
    """Raise :class:`SettingError` for what is no module."""
    if not isinstance(model, nn.Module):
        raise SettingError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def _check_mesh_shape(mesh_shape: tuple[int, int], options: PlanOptions) -> None:
    if min(mesh_shape) < 1:
        raise SettingError(f"every axis of the mesh must have at least 1 rank, not (replicate, shard) = {mesh_shape}")
    if options.storage == "replicated" and mesh_shape[0] > 1:
        raise MeshError(
            'storage="replicated" keeps whole parameters on every rank, so it has one axis only; pass all ranks as the '
            "1-D mesh and no replicate_mesh"
        )


def _select(tree: ModuleTree, predicate: Predicate) -> tuple[list[NamedParameter], list[str], list[str], list[str]]:
    """Return managed parameters, names of frozen ones and of those left to others, and warnings."""
    chosen: list[NamedParameter] = []
    frozen: list[str] = []
    guests: list[str] = []
    warnings: list[str] = []
    for entry in tree.parameters:
        matched = bool(predicate(entry.name, entry.parameter))
        if not entry.parameter.requires_grad:
            frozen.append(entry.name)
        elif entry.parameter.numel() == 0:
            warnings.append(f"{entry.name} has no elements and is left where it is")
        elif matched:
            chosen.append(entry)
        else:
            guests.append(entry.name)
    if not chosen:
        raise NothingMatched(
            f"the predicate chose none of {len(tree.parameters)} parameters that train; pass one that holds for them, "
            "such as lambda name, parameter: parameter.requires_grad"
        )
    return chosen, frozen, guests, warnings


def _refuse_sharded(chosen: Sequence[NamedParameter]) -> None:
    """Refuse parameters that another library has already spread over a mesh; orthogonalising shards is not the same."""
    found = [
        f"{entry.name} on {entry.parameter.device_mesh} as {list(entry.parameter.placements)}"
        for entry in chosen
        if isinstance(entry.parameter, DTensor)
    ]
    if found:
        raise AlreadySharded(
            f"already distributed: {'; '.join(found)}; give the runtime plain parameters: call dedicate_params before "
            "fully_shard, which then takes ignored_params=ignored_params(model), or leave these out of the predicate",
            found,
        )


def _policy_warnings(policy: ParamPolicy, chosen: Sequence[NamedParameter]) -> list[str]:
    return [
        f"overrides[{index}] ({', '.join(override.tokens)}) matches no managed parameter"
        for index, override in enumerate(policy.overrides)
        if not any(override.matches(entry.names) for entry in chosen)
    ]


def _parameter_plans(
    chosen: Sequence[NamedParameter],
    policies: Mapping[str, PolicyFields],
    boundaries: Mapping[str, str],
    world_size: int,
    options: PlanOptions,
) -> tuple[ParameterPlan, ...]:
    plans = [_one_parameter(e, policies[e.name], boundaries[e.name], options.owner_cost_model) for e in chosen]
    packs = _pack(plans, world_size)
    items = [
        WorkItem(plans[p[0]].name, sum(plans[i].cost for i in p), plans[p[0]].unit, _short_side(plans[p[0]]))
        for p in packs
    ]
    for pack, owner in zip(packs, assign_owners(items, world_size, options.owner_strategy), strict=True):
        for index in pack:
            plans[index] = replace(plans[index], owner=owner)
    return tuple(plans)


def _pack(plans: Sequence[ParameterPlan], world_size: int) -> list[list[int]]:
    """Group what is placed together: the small ``adamw`` parameters of a unit, so that they share one collective.

    A group stays below a hundredth of one rank's ideal load, so the balance does not suffer.
    """
    owned = [index for index, plan in enumerate(plans) if plan.route != "sharded_adamw"]
    limit = sum(plans[index].cost for index in owned) / world_size / 100
    packs: list[list[int]] = []
    open_packs: dict[str, tuple[list[int], float]] = {}
    for index in owned:
        plan = plans[index]
        pack, cost = open_packs.get(plan.unit, ([], 0.0))
        if plan.route == "muon" or plan.cost > limit:
            packs.append([index])
        elif pack and cost + plan.cost <= limit:
            pack.append(index)
            open_packs[plan.unit] = (pack, cost + plan.cost)
        else:
            packs.append([index])
            open_packs[plan.unit] = (packs[-1], plan.cost)
    return packs


def _short_side(plan: ParameterPlan) -> int:
    if plan.route != "muon":
        return 0
    shape = matrix_shapes(plan.shape, plan.matrix_view, plan.split_rows)[0]
    return min(shape.rows, shape.columns)


def _one_parameter(entry: NamedParameter, policy: PolicyFields, unit: str, cost_model: CostModel) -> ParameterPlan:
    parameter = entry.parameter
    own = parameter.dtype
    if own not in DTYPE_NAMES.values():
        raise SettingError(f"{entry.name} has dtype {own}; only {', '.join(DTYPE_NAMES)} can be trained")
    shape = tuple(parameter.shape)
    is_muon = policy.route == "muon"
    matrices = matrix_shapes(shape, policy.matrix_view, policy.split_rows) if is_muon else ()
    param_dtype = policy.param_dtype or own
    master: torch.dtype = policy.master_dtype or own
    return ParameterPlan(
        name=entry.name,
        aliases=tuple(entry.names[1:]),
        shape=shape,
        elements=parameter.numel(),
        route=policy.route,
        rule=policy.rule,
        matched_overrides=policy.matched_overrides,
        owner=None,
        unit=unit,
        param_dtype=dtype_name(param_dtype),
        grad_dtype=dtype_name(policy.grad_dtype or param_dtype),
        output_dtype=dtype_name(policy.output_dtype) if policy.output_dtype else None,
        cast_forward_inputs=policy.cast_forward_inputs,
        master_dtype=dtype_name(master),
        optim_dtype=dtype_name(policy.optim_dtype or master),
        matrix_view=policy.matrix_view if is_muon else None,
        split_rows=policy.split_rows if is_muon else (),
        cost=owner_cost(matrices, parameter.numel(), cost_model),
    )


@dataclass(frozen=True)
class _Layout:
    """What buckets depend on beyond their parameters."""

    num_shards: int
    publish_dtype: torch.dtype | None


def _unit_plan(
    index: int, name: str, mine: Sequence[int], parameters: Sequence[ParameterPlan], layout: _Layout
) -> UnitPlan:
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in mine:
        plan = parameters[i]
        owner = "" if plan.owner is None else f"{plan.owner:08d}"
        dtypes = (plan.param_dtype, plan.grad_dtype, plan.master_dtype, plan.optim_dtype)
        groups.setdefault((plan.route, owner, *dtypes), []).append(i)
    buckets = tuple(_bucket_plan(index, groups[key], parameters, layout) for key in sorted(groups))
    return UnitPlan(name, tuple(mine), buckets, *_casts(name, [parameters[i] for i in mine]))


def _bucket_plan(unit: int, members: Sequence[int], parameters: Sequence[ParameterPlan], layout: _Layout) -> BucketPlan:
    first = parameters[members[0]]
    step = max(1, _ALIGN_BYTES // DTYPE_NAMES[first.param_dtype].itemsize)
    offsets: list[int] = []
    numel = 0
    for member in members:
        offsets.append(numel)
        numel += math.ceil(parameters[member].elements / step) * step
    if first.owner is None:
        numel = math.ceil(numel / layout.num_shards) * layout.num_shards
    return BucketPlan(
        unit=unit,
        route=first.route,
        owner=first.owner,
        parameters=tuple(members),
        offsets=tuple(offsets),
        numel=numel,
        param_dtype=first.param_dtype,
        grad_dtype=first.grad_dtype,
        master_dtype=first.master_dtype,
        optim_dtype=first.optim_dtype,
        publish_dtype=dtype_name(layout.publish_dtype) if layout.publish_dtype else first.param_dtype,
    )


def _casts(unit: str, parameters: Sequence[ParameterPlan]) -> tuple[str | None, str | None]:
    """Return the dtype that inputs and outputs of a unit are cast to; refuse contradictions."""
    inputs = sorted({plan.param_dtype for plan in parameters})
    outputs = sorted({plan.output_dtype for plan in parameters if plan.output_dtype})
    wants_cast = any(plan.cast_forward_inputs for plan in parameters)
    where = unit or "the model"
    names = [plan.name for plan in parameters]
    if wants_cast and len(inputs) > 1:
        raise DtypeConflict(
            f"{where} casts its inputs, but has mixed param dtypes {inputs}; give the odd ones a boundary of their own "
            "or set cast_forward_inputs to false",
            names,
        )
    if len(outputs) > 1:
        raise DtypeConflict(f"{where} has mixed output_dtype {outputs}; one boundary can cast to one dtype", names)
    return (inputs[0] if wants_cast else None), (outputs[0] if outputs else None)


def _backward_order(names: Sequence[str], tree: ModuleTree) -> tuple[int, ...]:
    """Order units by when their forward ends, last first: an enclosing module ends after all it contains."""
    ends = {name: (tree.last_descendant[name], -tree.position[name]) for name in names}
    return tuple(sorted(range(len(names)), key=lambda index: ends[names[index]], reverse=True))
