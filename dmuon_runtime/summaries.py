"""Plans and groups as plain dictionaries: JSON by content, a table when printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import nn

from dmuon_runtime.muon import Muon
from dmuon_runtime.plan import BucketPlan, RuntimePlan
from dmuon_runtime.runtime import find_runtime

__all__ = ["CommPlanSummary", "ParamGroupSummary", "summarize_comm_plan", "summarize_param_groups"]


_BUCKET_COLUMNS = (
    "unit", "route", "owner_rank", "num_parameters", "gather_bytes", "reduce_bytes", "publish_bytes"
)  # fmt: skip


def _table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    cells = [list(columns), *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


class ParamGroupSummary(dict[str, object]):
    """Groups and parameters with their routes."""

    def __str__(self) -> str:
        rows = cast("list[dict[str, object]]", self["parameters"])
        warnings = "".join(f"\nwarning: {text}" for text in cast("list[str]", self["warnings"]))
        counts = ", ".join(f"{route} {n}" for route, n in cast("dict[str, int]", self["route_param_counts"]).items())
        columns = ("name", "route", "rule", "owner_rank", "group_name", "shape", "param_dtype", "master_dtype")
        return f"{len(rows)} parameters: {counts}\n{_table(rows, columns)}{warnings}"


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
        return (
            f"plan {str(self['hash'])[:12]} on (replicate, shard) = {self['mesh_shape']}, storage {self['storage']}\n"
            f"{_table(rows, _BUCKET_COLUMNS)}\n"
            f"{_table(traffic, ('route', 'phase', 'collectives', 'payload_bytes'))}"
        )


def summarize_param_groups(model: nn.Module, optimizer: Muon) -> ParamGroupSummary:
    """Return which parameter is in which group, on which route, and why; no communication, the same on all ranks."""
    runtime = find_runtime(model)
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    rows: list[dict[str, object]] = []
    for parameter, plan in zip(runtime.parameters, runtime.plan.parameters, strict=True):
        index = group_of[id(parameter)]
        rows.append(
            {
                "name": plan.name, "aliases": list(plan.aliases), "route": plan.route, "rule": plan.rule,
                "matched_policy_overrides": list(plan.matched_overrides), "owner_rank": plan.owner,
                "group_index": index, "group_name": optimizer.param_groups[index]["group_name"],
                "shape": list(plan.shape), "numel": plan.elements, "unit": plan.unit, "param_dtype": plan.param_dtype,
                "grad_dtype": plan.grad_dtype, "output_dtype": plan.output_dtype, "master_dtype": plan.master_dtype,
                "optim_dtype": plan.optim_dtype, "cast_forward_inputs": plan.cast_forward_inputs,
            }
        )  # fmt: skip
    counts: dict[str, int] = {}
    for row in rows:
        counts[str(row["route"])] = counts.get(str(row["route"]), 0) + 1
    groups: list[dict[str, object]] = [
        {"group_index": i, "num_parameters": len(g["params"]), **{k: v for k, v in g.items() if k != "params"}}
        for i, g in enumerate(optimizer.param_groups)
    ]
    return ParamGroupSummary(
        num_groups=len(groups),
        groups=groups,
        parameters=rows,
        route_param_counts=counts,
        guests=[
            {
                "name": guest.name,
                "route": "adamw",
                "manager": guest.manager,
                "shape": list(guest.parameter.shape),
                "group_index": group_of[id(guest.parameter)],
                "local_numel": guest.master.numel(),
            }
            for guest in optimizer.guests
        ],
        frozen=list(runtime.plan.frozen),
        warnings=list(runtime.plan.warnings),
    )


def _is_published(plan: RuntimePlan, bucket: BucketPlan) -> bool:
    return plan.storage == "replicated" or (plan.mesh_shape[0] > 1 and bucket.owner is not None)


def summarize_comm_plan(model: nn.Module) -> CommPlanSummary:
    """Return units, buckets and the traffic predicted for one step with one backward; no communication.

    ``traffic`` is that of this rank; ``planned_cost`` and ``resident_bytes`` are by rank.
    """
    runtime = find_runtime(model)
    plan = runtime.plan
    units: list[dict[str, object]] = [
        {
            "name": unit.name or "<root>",
            "num_parameters": len(unit.parameters),
            "buckets": [
                {
                    "route": bucket.route,
                    "owner_rank": bucket.owner,
                    "num_parameters": len(bucket.parameters),
                    "gather_bytes": bucket.gather_bytes,
                    "reduce_bytes": bucket.reduce_bytes,
                    "publish_bytes": bucket.publish_bytes if _is_published(plan, bucket) else 0,
                }
                for bucket in unit.buckets
            ],
        }
        for unit in plan.units
    ]
    traffic: list[dict[str, object]] = [
        {"route": route, "phase": phase, "collectives": item.collectives, "payload_bytes": item.payload_bytes}
        for (route, phase), item in plan.rank_traffic[runtime.transport.rank].items()
    ]
    return CommPlanSummary(
        hash=plan.hash,
        world_size=plan.world_size,
        mesh_shape=list(plan.mesh_shape),
        storage=plan.storage,
        units=units,
        traffic=traffic,
        planned_cost=[rank.cost for rank in plan.ranks],
        resident_bytes=[rank.resident_bytes for rank in plan.ranks],
        predicted_imbalance=plan.predicted_imbalance,
        warnings=list(plan.warnings),
    )
