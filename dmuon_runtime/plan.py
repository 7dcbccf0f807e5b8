"""The plan: what every rank will do, as frozen values that depend on names, shapes and a world size only.

Byte counts are payload bytes on one rank in one optimizer step with one forward and one backward: a broadcast or reduce
counts its bucket, an all-gather its output, a reduce-scatter its input. In a world of one nothing is communicated.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from dmuon_runtime.matrices import matrix_shapes
from dmuon_runtime.partition import ns_flops
from dmuon_runtime.policy import DTYPE_NAMES, Route

__all__ = ["BucketPlan", "ParameterPlan", "Phase", "RankPlan", "RuntimePlan", "Traffic", "UnitPlan"]

Phase = str
"""``forward``, ``backward`` (materialised again), ``reduce``, ``publish`` or ``tp``."""
_STATE_SLOTS = {"muon": 1, "adamw": 2, "sharded_adamw": 2}


def _size(dtype: str) -> int:
    return DTYPE_NAMES[dtype].itemsize


@dataclass(frozen=True)
class ParameterPlan:
    """What happens to one parameter and which rule decided it. dtypes are names such as ``bfloat16``."""

    name: str
    aliases: tuple[str, ...]
    """Other names of the same tensor (tied weights)."""
    shape: tuple[int, ...]
    elements: int
    route: Route
    rule: str
    matched_overrides: tuple[int, ...]
    owner: int | None
    """Rank that updates it; None when every rank updates its own shard."""
    unit: str
    """Name of the module at whose boundary it is gathered; empty for the model itself."""
    param_dtype: str
    grad_dtype: str
    output_dtype: str | None
    cast_forward_inputs: bool
    master_dtype: str
    optim_dtype: str
    matrix_view: str | None
    split_rows: tuple[int, ...]
    cost: float
    """Planned owner cost in FLOPs or their equivalent."""

    @property
    def num_matrices(self) -> int:
        """Matrices that Newton-Schulz gets from it in a step."""
        if self.route != "muon":
            return 0
        return sum(shape.count for shape in matrix_shapes(self.shape, self.matrix_view, self.split_rows))

    @property
    def ns_flops(self) -> float:
        """Newton-Schulz FLOPs of it in a step."""
        if self.route != "muon":
            return 0.0
        return sum(ns_flops(shape) for shape in matrix_shapes(self.shape, self.matrix_view, self.split_rows))


@dataclass(frozen=True)
class BucketPlan:
    """Parameters that travel in one collective: one owner's of a route, or one sharded set, with equal dtypes."""

    unit: int
    route: Route
    owner: int | None
    parameters: tuple[int, ...]
    """Indices into the plan's parameters."""
    offsets: tuple[int, ...]
    """Element offset of each parameter in the flat buffer."""
    numel: int
    """Elements of the flat buffer, gaps for alignment and padding to equal shards included."""
    param_dtype: str
    grad_dtype: str
    master_dtype: str
    optim_dtype: str

    @property
    def gather_bytes(self) -> int:
        """Payload of one materialisation."""
        return self.numel * _size(self.param_dtype)

    @property
    def reduce_bytes(self) -> int:
        """Payload of one gradient reduction."""
        return self.numel * _size(self.grad_dtype)


@dataclass(frozen=True)
class UnitPlan:
    """What is materialised and freed together at the boundary module ``name``."""

    name: str
    parameters: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]
    cast_inputs_to: str | None
    output_dtype: str | None


@dataclass(frozen=True)
class Traffic:
    """Collectives and payload bytes on one rank in one step."""

    collectives: int
    payload_bytes: int


@dataclass(frozen=True)
class RankPlan:
    """Load and memory of one rank."""

    rank: int
    cost: float
    matrices: int
    resident_bytes: int
    """Master weights and optimizer state, which stay between steps."""
    peak_bytes: int
    """Resident bytes, own reduced gradients, and the largest materialised units with their local gradients."""


@dataclass(frozen=True)
class RuntimePlan:
    """Everything that all ranks must agree on. Units are in gather order of the forward."""

    format_version: int
    world_size: int
    reshard_after_forward: bool
    storage: str
    process_group_policy: str
    owner_strategy: str
    owner_cost_model: str
    parameters: tuple[ParameterPlan, ...]
    units: tuple[UnitPlan, ...]
    backward_order: tuple[int, ...]
    """Unit indices in gather order of the backward."""
    frozen: tuple[str, ...]
    """Parameters that do not train and stay whole on every rank."""
    warnings: tuple[str, ...]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the canonical JSON of the whole plan."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """All buckets in unit order."""
        return tuple(bucket for unit in self.units for bucket in unit.buckets)

    @cached_property
    def traffic(self) -> dict[tuple[Route, Phase], Traffic]:
        """Predicted traffic by route and phase; empty in a world of one."""
        totals: dict[tuple[Route, Phase], Traffic] = {}
        if self.world_size == 1:
            return totals
        for bucket in self.buckets:
            phases = [("forward", bucket.gather_bytes), ("reduce", bucket.reduce_bytes)]
            if self.reshard_after_forward:
                phases.append(("backward", bucket.gather_bytes))
            for phase, size in phases:
                old = totals.get((bucket.route, phase), Traffic(0, 0))
                totals[bucket.route, phase] = Traffic(old.collectives + 1, old.payload_bytes + size)
        return totals

    @cached_property
    def ranks(self) -> tuple[RankPlan, ...]:
        """Load and memory of every rank."""
        cost, matrices = [0.0] * self.world_size, [0] * self.world_size
        resident, gradients = [0] * self.world_size, [0] * self.world_size
        for parameter in self.parameters:
            if parameter.owner is not None:
                cost[parameter.owner] += parameter.cost
                matrices[parameter.owner] += parameter.num_matrices
        for bucket in self.buckets:
            state = _STATE_SLOTS[bucket.route] * _size(bucket.optim_dtype)
            every = bucket.owner is None
            share = bucket.numel // self.world_size if every else bucket.numel
            for rank in range(self.world_size) if every else (bucket.owner or 0,):
                resident[rank] += share * (_size(bucket.master_dtype) + state)
                gradients[rank] += share * _size(bucket.optim_dtype)
                cost[rank] += self._sharded_cost(bucket) if every else 0.0
        working = self._working_bytes()
        return tuple(
            RankPlan(rank, cost[rank], matrices[rank], resident[rank], resident[rank] + gradients[rank] + working)
            for rank in range(self.world_size)
        )

    @property
    def ns_flops(self) -> float:
        """Newton-Schulz FLOPs of all ranks in one step."""
        return sum(parameter.ns_flops for parameter in self.parameters)

    @property
    def num_matrices(self) -> int:
        """Matrices orthogonalised by all ranks in one step."""
        return sum(parameter.num_matrices for parameter in self.parameters)

    @property
    def predicted_imbalance(self) -> float:
        """Largest planned cost over the mean."""
        costs = [rank.cost for rank in self.ranks]
        return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0

    def _sharded_cost(self, bucket: BucketPlan) -> float:
        return sum(self.parameters[index].cost for index in bucket.parameters) / self.world_size

    def _working_bytes(self) -> int:
        """Return bytes of materialised parameters plus local gradients and their buckets at the worst moment."""
        weights = [sum(bucket.gather_bytes for bucket in unit.buckets) for unit in self.units]
        gradients = [sum(bucket.gather_bytes + bucket.reduce_bytes for bucket in unit.buckets) for unit in self.units]
        live = sum(sorted(weights)[-2:]) if self.reshard_after_forward else sum(weights)
        return live + sum(sorted(gradients)[-2:])
