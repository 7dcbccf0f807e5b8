"""The plan: what every rank will do, as frozen values that depend on names, shapes and a mesh shape only.

Ranks are numbered along the mesh, the shard axis last: rank = replicate rank * shards + shard rank. A *row* is the
ranks of one replica, a *column* those with one shard rank. How many collectives and bytes follow is in ``forecast.py``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from dmuon_runtime.forecast import RankPlan, Traffic, TrafficTable, forecast_ranks, forecast_traffic
from dmuon_runtime.matrices import matrix_shapes
from dmuon_runtime.partition import NsWork, ns_flops
from dmuon_runtime.policy import DTYPE_NAMES, Route

__all__ = ["BucketPlan", "ParameterPlan", "Phase", "RankPlan", "RuntimePlan", "Traffic", "TrafficTable", "UnitPlan"]

Phase = str
"""``forward``, ``backward`` (materialised again), ``reduce``, ``publish`` or ``tp``."""


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
    """Planned owner cost in FLOPs or their equivalent, of Newton-Schulz as it is by default."""

    @property
    def num_matrices(self) -> int:
        """Matrices that Newton-Schulz gets from it in a step."""
        if self.route != "muon":
            return 0
        return sum(shape.count for shape in matrix_shapes(self.shape, self.matrix_view, self.split_rows))

    def ns_flops(self, work: NsWork) -> float:
        """Return the FLOPs of its Newton-Schulz in a step."""
        if self.route != "muon":
            return 0.0
        return sum(ns_flops(shape, work) for shape in matrix_shapes(self.shape, self.matrix_view, self.split_rows))


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
    publish_dtype: str

    @property
    def gather_bytes(self) -> int:
        """Payload of one materialisation."""
        return self.numel * _size(self.param_dtype)

    @property
    def reduce_bytes(self) -> int:
        """Payload of one gradient reduction."""
        return self.numel * _size(self.grad_dtype)

    @property
    def publish_bytes(self) -> int:
        """Payload of one publication of new weights to other replicas."""
        return self.numel * _size(self.publish_dtype)

    @property
    def master_bytes(self) -> int:
        """Master weights of the whole bucket."""
        return self.numel * _size(self.master_dtype)

    @property
    def optim_bytes(self) -> int:
        """One optimizer-state slot, or the reduced gradient, of the whole bucket."""
        return self.numel * _size(self.optim_dtype)


@dataclass(frozen=True)
class UnitPlan:
    """What is materialised and freed together at the boundary module ``name``."""

    name: str
    parameters: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]
    cast_inputs_to: str | None
    output_dtype: str | None


@dataclass(frozen=True)
class RuntimePlan:
    """Everything that all ranks must agree on. Units are in gather order of the forward."""

    format_version: int
    world_size: int
    mesh_shape: tuple[int, int]
    """Replicate and shard axis."""
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
    guests: tuple[str, ...]
    """Parameters that train but are left to FSDP2 or DDP."""
    warnings: tuple[str, ...]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the canonical JSON of the whole plan."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """All buckets in unit order."""
        return tuple(bucket for unit in self.units for bucket in unit.buckets)

    def place(self, owner: int) -> tuple[int, int]:
        """Return an owner's shard and replicate rank."""
        return owner % self.mesh_shape[1], owner // self.mesh_shape[1]

    @cached_property
    def rank_traffic(self) -> tuple[TrafficTable, ...]:
        """Predicted traffic of every rank; ranks of one column are alike."""
        return forecast_traffic(self) * self.mesh_shape[0]

    @property
    def traffic(self) -> TrafficTable:
        """Predicted traffic of rank 0, and of every rank when there is one replica; empty in a world of one."""
        return self.rank_traffic[0]

    @cached_property
    def ranks(self) -> tuple[RankPlan, ...]:
        """Load and memory of every rank."""
        return forecast_ranks(self)

    def ns_flops(self, work: NsWork) -> float:
        """Return the Newton-Schulz FLOPs of all ranks in one step, iterating as ``work`` says."""
        return sum(parameter.ns_flops(work) for parameter in self.parameters)

    @property
    def num_matrices(self) -> int:
        """Matrices orthogonalised by all ranks in one step."""
        return sum(parameter.num_matrices for parameter in self.parameters)

    @property
    def predicted_imbalance(self) -> float:
        """Largest planned cost over the mean."""
        costs = [rank.cost for rank in self.ranks]
        return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0
