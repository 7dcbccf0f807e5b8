"""Plans and groups as plain dictionaries: JSON by content, a table when printed. Their keys are a stable schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from dmuon_runtime.chips import ChipFigures
from dmuon_runtime.cost_model import StepWork, predict_step
from dmuon_runtime.matrices import matrix_shapes
from dmuon_runtime.matrix_updates import update_scale
from dmuon_runtime.muon import Muon
from dmuon_runtime.plan import BucketPlan, ParameterPlan, RuntimePlan, UnitPlan
from dmuon_runtime.runtime import find_runtime

__all__ = ["CommPlanSummary", "ParamGroupSummary", "summarize_comm_plan", "summarize_param_groups"]

LOW_MUON_RATIO = 0.1
"""Share of elements on the muon route below which the summary warns."""


_BUCKET_COLUMNS = (
    "unit", "route", "owner_rank", "num_parameters", "gather_bytes", "reduce_bytes", "publish_bytes"
)  # fmt: skip


def _table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Return aligned text; columns are ``key`` or ``key=title``, and what is None shows as a dash."""
    keys, titles = zip(*((column.partition("=")[0], column.rpartition("=")[2]) for column in columns), strict=True)
    cells = [list(titles), *([str("-" if row[key] is None else row[key]) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


_PARAMETER_COLUMNS = (
    "name", "route", "rule", "matched_policy_overrides=overrides", "owner_rank=owner", "group_name=group", "lr",
    "shape", "param_dtype=param", "grad_dtype=grad", "output_dtype=output", "master_dtype=master",
)  # fmt: skip


class ParamGroupSummary(dict[str, object]):
    """Groups and parameters with their routes."""

    def __str__(self) -> str:
        rows = cast("list[dict[str, object]]", self["parameters"])
        warnings = "".join(f"\nwarning: {text}" for text in cast("list[str]", self["warnings"]))
        counts = ", ".join(f"{route} {n}" for route, n in cast("dict[str, int]", self["route_param_counts"]).items())
        hidden = cast(int, self["dedicated_param_count"]) - len(rows)
        more = f"\n... and {hidden} more" if hidden else ""
        return (
            f"{self['dedicated_param_count']} parameters: {counts}\n{_table(rows, _PARAMETER_COLUMNS)}{more}{warnings}"
        )


_RANK_COLUMNS = ("rank", "cost", "matrices", "resident_bytes", "peak_bytes")


class CommPlanSummary(dict[str, object]):
    """Units, buckets and predicted traffic."""

    def __str__(self) -> str:
        units = cast("list[dict[str, object]]", self["units"])
        rows = [
            {**bucket, "unit": unit["name"]}
            for unit in units
            for bucket in cast("list[dict[str, object]]", unit["buckets"])
        ]
        traffic = cast("list[dict[str, object]]", self["traffic"])
        hidden = cast(int, self["unit_count"]) - len(units)
        more = f"... and {hidden} more units\n" if hidden else ""
        return (
            f"plan {str(self['hash'])[:12]} on (replicate, shard) = {self['mesh_shape']}, storage {self['storage']}\n"
            f"{_table(rows, _BUCKET_COLUMNS)}\n"
            f"{more}{_table(traffic, ('route', 'phase', 'collectives', 'payload_bytes'))}\n"
            f"{_table(cast('list[dict[str, object]]', self['ranks']), _RANK_COLUMNS)}"
        )


def summarize_param_groups(model: nn.Module, optimizer: Muon, *, max_rows: int | None = None) -> ParamGroupSummary:
    """Return which parameter is in which group, on which route, why, and at what rate; no communication.

    ``is_owner`` (this rank updates it, or a part of it) and the owned counts are this rank's; everything else is the
    same on all ranks. ``max_rows`` limits ``parameters``, never the counts.
    """
    runtime = find_runtime(model)
    plan = runtime.plan
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    held = {piece.index for piece in optimizer.pieces}
    rows = [
        _parameter_row(entry, group_of[id(parameter)], optimizer, place in held)
        for place, (entry, parameter) in enumerate(zip(plan.parameters, runtime.parameters, strict=True))
    ]
    routes = _routes(rows)
    shown = rows if max_rows is None else rows[:max_rows]
    return ParamGroupSummary(
        available=True,
        num_groups=len(optimizer.param_groups),
        dedicated_param_count=len(rows),
        owned_dedicated_param_count=sum(bool(row["is_owner"]) for row in rows),
        groups=[_group_row(i, group, rows) for i, group in enumerate(optimizer.param_groups)],
        parameters=shown,
        parameters_truncated=len(shown) < len(rows),
        route_param_counts={route: share["parameters"] for route, share in routes.items()},
        routes=routes,
        guests=[
            {
                "name": guest.name,
                "manager": guest.manager,
                "group_index": group_of[id(guest.parameter)],
                "shape": list(guest.parameter.shape),
                "local_numel": guest.master.numel(),
            }
            for guest in optimizer.guests
        ],
        frozen=list(plan.frozen),
        warnings=[*plan.warnings, *_share_warnings(routes)],
    )


def _parameter_row(entry: ParameterPlan, index: int, optimizer: Muon, is_owner: bool) -> dict[str, object]:
    group = optimizer.param_groups[index]
    route = group["route"]
    scale = None
    if route == "muon":
        shape = matrix_shapes(entry.shape, entry.matrix_view, entry.split_rows)[0]
        scale = update_scale(optimizer.scale, shape.rows, shape.columns)
    return {
        "name": entry.name, "param_name": entry.name.rpartition(".")[2], "aliases": list(entry.aliases),
        "route": route, "rule": entry.rule if route == entry.route else "param_groups",
        "planned_route": entry.route, "uses_sharded_adamw": entry.route == "sharded_adamw",
        "matched_policy_overrides": list(entry.matched_overrides), "owner_rank": entry.owner,
        "is_owner": is_owner, "group_index": index, "group_name": group["group_name"],
        "lr": _plain(group["lr"]), "weight_decay": _plain(group["weight_decay"]), "update_scale": scale,
        "shape": list(entry.shape), "numel": entry.elements, "unit": entry.unit, "matrix_view": entry.matrix_view,
        "split_rows": list(entry.split_rows), "param_dtype": entry.param_dtype, "grad_dtype": entry.grad_dtype,
        "output_dtype": entry.output_dtype, "master_dtype": entry.master_dtype, "optim_dtype": entry.optim_dtype,
        "cast_forward_inputs": entry.cast_forward_inputs,
    }  # fmt: skip


def _group_row(index: int, group: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    mine = [row for row in rows if row["group_index"] == index]
    settings = {key: _plain(value) for key, value in group.items() if key != "params"}
    return {
        "group_index": index,
        "num_parameters": len(mine),
        "owned_param_count": sum(bool(row["is_owner"]) for row in mine),
        "num_elements": sum(cast(int, row["numel"]) for row in mine),
        "use_muon": group["route"] == "muon",
        **settings,
    }


def _routes(rows: Sequence[Mapping[str, object]]) -> dict[str, dict[str, float]]:
    """Return parameters, elements and share of elements by route."""
    total = sum(cast(int, row["numel"]) for row in rows)
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        share = found.setdefault(str(row["route"]), {"parameters": 0, "elements": 0})
        share["parameters"] += 1
        share["elements"] += cast(int, row["numel"])
    for share in found.values():
        share["element_ratio"] = share["elements"] / total
    return found


def _share_warnings(routes: Mapping[str, Mapping[str, float]]) -> list[str]:
    ratio = routes["muon"]["element_ratio"] if "muon" in routes else 0.0
    if ratio >= LOW_MUON_RATIO:
        return []
    return [f"only {ratio:.1%} of all elements are on the muon route; look at the rules if that is not meant"]


def _plain(value: object) -> object:
    """Return ``value`` as JSON has it."""
    if isinstance(value, Tensor):
        return float(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def summarize_comm_plan(
    model: nn.Module, *, max_units: int | None = None, chip: ChipFigures | None = None, work: StepWork | None = None
) -> CommPlanSummary:
    """Return units, buckets, load by rank, and the traffic predicted for one step with one backward; no communication.

    ``traffic`` and ``totals`` are this rank's: with replicas columns differ. All else is the same on all ranks.
    ``max_units`` limits ``units``, never the totals. With a chip and a rank's work in a step, ``predicted`` has the
    seconds of a step on it; else it is None.
    """
    runtime = find_runtime(model)
    plan = runtime.plan
    predicted = None if chip is None or work is None else predict_step(plan, chip, work)
    shown = plan.units if max_units is None else plan.units[:max_units]
    traffic: list[dict[str, object]] = [
        {"route": route, "phase": phase, "collectives": item.collectives, "payload_bytes": item.payload_bytes}
        for (route, phase), item in plan.rank_traffic[runtime.transport.rank].items()
    ]
    return CommPlanSummary(
        available=True,
        hash=plan.hash,
        world_size=plan.world_size,
        mesh_shape=list(plan.mesh_shape),
        storage=plan.storage,
        unit_count=len(plan.units),
        units=[_unit_row(index, unit, plan) for index, unit in enumerate(shown)],
        units_truncated=len(shown) < len(plan.units),
        traffic=traffic,
        totals=_totals(plan, runtime.transport.rank),
        ranks=[{column: getattr(rank, column) for column in _RANK_COLUMNS} for rank in plan.ranks],
        planned_cost=[rank.cost for rank in plan.ranks],
        predicted_imbalance=plan.predicted_imbalance,
        predicted=None if predicted is None else predicted.as_dict(),
        warnings=list(plan.warnings),
    )


def _unit_row(index: int, unit: UnitPlan, plan: RuntimePlan) -> dict[str, object]:
    return {
        "unit_index": index,
        "name": unit.name or "<root>",
        "num_parameters": len(unit.parameters),
        "cast_inputs_to": unit.cast_inputs_to,
        "output_dtype": unit.output_dtype,
        "buckets": [_bucket_row(i, bucket, plan) for i, bucket in enumerate(unit.buckets)],
    }


def _bucket_row(index: int, bucket: BucketPlan, plan: RuntimePlan) -> dict[str, object]:
    return {
        "bucket_index": index, "route": bucket.route, "owner_rank": bucket.owner,
        "num_parameters": len(bucket.parameters), "parameters": [plan.parameters[i].name for i in bucket.parameters],
        "numel": bucket.numel, "param_dtype": bucket.param_dtype, "grad_dtype": bucket.grad_dtype,
        "gather_bytes": bucket.gather_bytes, "reduce_bytes": bucket.reduce_bytes,
        "publish_bytes": bucket.publish_bytes if _is_published(plan, bucket) else 0,
    }  # fmt: skip


def _is_published(plan: RuntimePlan, bucket: BucketPlan) -> bool:
    return plan.storage == "replicated" or (plan.mesh_shape[0] > 1 and bucket.owner is not None)


def _totals(plan: RuntimePlan, rank: int) -> dict[str, int]:
    """Return payload bytes of one step on a rank, and what an all-reduce of all gradients (data parallel) carries."""
    by_phase: dict[str, int] = {"forward": 0, "backward": 0, "reduce": 0, "publish": 0}
    for (_, phase), item in plan.rank_traffic[rank].items():
        by_phase[phase] = by_phase.get(phase, 0) + item.payload_bytes
    owned = [bucket.gather_bytes for bucket in plan.buckets if bucket.owner is not None]
    return {
        **{f"{phase}_bytes": size for phase, size in by_phase.items()},
        "max_owner_bucket_bytes": max(owned, default=0),
        "same_payload_all_reduce_bytes": sum(bucket.reduce_bytes for bucket in plan.buckets),
    }
