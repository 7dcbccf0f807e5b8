"""What a plan will cost on each rank: collectives, payload bytes, work and memory.

Payload bytes are those on one rank in one optimizer step with one forward and one backward: a broadcast or reduce
counts its bucket, an all-gather its output, a reduce-scatter its input. Along an axis of size 1 nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmuon_runtime.policy import Route

if TYPE_CHECKING:
    from dmuon_runtime.plan import BucketPlan, RuntimePlan

__all__ = ["RankPlan", "Traffic", "TrafficTable", "forecast_ranks", "forecast_traffic"]

_STATE_SLOTS = {"muon": 1, "adamw": 2, "sharded_adamw": 2}


@dataclass(frozen=True)
class Traffic:
    """Collectives and payload bytes on one rank in one step."""

    collectives: int
    payload_bytes: int


TrafficTable = dict[tuple[Route, str], Traffic]
"""Traffic by route and phase."""


@dataclass(frozen=True)
class RankPlan:
    """Load and memory of one rank."""

    rank: int
    cost: float
    matrices: int
    resident_bytes: int
    """Master weights, optimizer state and copies for publishing, which stay between steps; parameters that are kept."""
    peak_bytes: int
    """Resident bytes, own reduced gradients, and the largest materialised units with their local gradients."""


def forecast_traffic(plan: RuntimePlan) -> tuple[TrafficTable, ...]:
    """Return traffic by route and phase for the ranks of each column; in one pass over the buckets."""
    replicas, shards = plan.mesh_shape
    alike: TrafficTable = {}
    columns: list[TrafficTable] = [{} for _ in range(shards)]
    for bucket in plan.buckets:
        if shards > 1:
            for phase in _shard_phases(plan):
                _add(alike, bucket, phase, _payload_bytes(bucket, phase))
        if replicas > 1 and bucket.owner is None:
            _add(alike, bucket, "reduce", bucket.reduce_bytes // shards)
        elif replicas > 1 and bucket.owner is not None:
            for phase in ("reduce", "publish"):
                _add(columns[plan.place(bucket.owner)[0]], bucket, phase, _payload_bytes(bucket, phase))
    return tuple(_sum(alike, column) for column in columns)


def _shard_phases(plan: RuntimePlan) -> tuple[str, ...]:
    if plan.storage == "replicated":
        return ("reduce", "publish")
    return ("forward", "reduce", "backward") if plan.reshard_after_forward else ("forward", "reduce")


def _payload_bytes(bucket: BucketPlan, phase: str) -> int:
    if phase == "publish":
        return bucket.publish_bytes
    return bucket.reduce_bytes if phase == "reduce" else bucket.gather_bytes


def _add(table: TrafficTable, bucket: BucketPlan, phase: str, size: int) -> None:
    old = table.get((bucket.route, phase), Traffic(0, 0))
    table[bucket.route, phase] = Traffic(old.collectives + 1, old.payload_bytes + size)


def _sum(alike: TrafficTable, column: TrafficTable) -> TrafficTable:
    found = dict(alike)
    for key, item in column.items():
        old = found.get(key, Traffic(0, 0))
        found[key] = Traffic(old.collectives + item.collectives, old.payload_bytes + item.payload_bytes)
    return found


def forecast_ranks(plan: RuntimePlan) -> tuple[RankPlan, ...]:
    """Return load and memory of every rank; in one pass over parameters and buckets."""
    replicas, shards = plan.mesh_shape
    ranks = range(plan.world_size)
    cost, matrices = [0.0 for _ in ranks], [0 for _ in ranks]
    resident, gradients = [0 for _ in ranks], [0 for _ in ranks]
    shared_cost, shared_resident, shared_gradients = 0.0, 0, 0
    for parameter in plan.parameters:
        if parameter.owner is None:
            shared_cost += parameter.cost / shards
        else:
            cost[parameter.owner] += parameter.cost
            matrices[parameter.owner] += parameter.num_matrices
    for bucket in plan.buckets:
        updated = bucket.master_bytes + _STATE_SLOTS[bucket.route] * bucket.optim_bytes
        shared_resident += bucket.gather_bytes if plan.storage == "replicated" else 0
        if bucket.owner is None:
            shared_resident += updated // shards
            shared_gradients += bucket.optim_bytes // shards
            continue
        resident[bucket.owner] += updated
        gradients[bucket.owner] += bucket.optim_bytes
        for replica in range(replicas):
            rank = replica * shards + plan.place(bucket.owner)[0]
            resident[rank] += bucket.publish_bytes * (rank != bucket.owner)
    working = _working_bytes(plan)
    return tuple(
        RankPlan(
            rank, cost[rank] + shared_cost, matrices[rank], resident[rank] + shared_resident,
            resident[rank] + shared_resident + gradients[rank] + shared_gradients + working,
        )
        for rank in ranks
    )  # fmt: skip


def _working_bytes(plan: RuntimePlan) -> int:
    """Return bytes of materialised parameters plus local gradients and their buckets at the worst moment."""
    weights = [sum(bucket.gather_bytes for bucket in unit.buckets) for unit in plan.units]
    gradients = [sum(bucket.gather_bytes + bucket.reduce_bytes for bucket in unit.buckets) for unit in plan.units]
    live = sum(sorted(weights)[-2:]) if plan.reshard_after_forward else sum(weights)
    if plan.storage == "replicated":
        live = 0  # parameters are resident
    return live + sum(sorted(gradients)[-2:])
