"""The plan of a job as a document: what the planner answers, the workers confirm and the dashboards compare with.

Byte counts are *payload bytes in one optimizer step*: for a broadcast or reduce the size of the bucket, for an
all-gather the size of the gathered output, for a reduce-scatter the size of the input. A rank counts what it takes part
in; with replicas ranks differ in that, so the figure of a job is the sum over its ranks.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from worker.contract.spec import Route

__all__ = ["CostPlan", "DataPlan", "ParameterPlan", "Phase", "PlanReport", "RankPlan", "RoutePlan", "TrafficPlan"]

Phase = Literal["forward", "backward", "reduce", "publish", "tp"]


class Part(BaseModel):
    """Base of the parts: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ParameterPlan(Part):
    """What happens to one parameter and which rule decided it."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor (tied weights)."""
    shape: tuple[int, ...]
    elements: int
    route: Route
    rule: str
    """``defaults``, ``overrides[i]`` (the last that set the route) or ``route_hint_fn``; of a baseline, in words."""
    owner: int | None
    """Rank that updates it; None when every rank updates its own shard."""
    unit: str
    """Name of the module at whose boundary it is gathered."""


class RoutePlan(Part):
    """Totals of one route."""

    route: Route
    parameters: int
    elements: int


class TrafficPlan(Part):
    """Collectives of one route in one phase in one optimizer step."""

    route: Route
    phase: Phase
    collectives: int
    """On the busiest rank; with one replica all ranks are alike."""
    payload_bytes: int
    """On the busiest rank."""
    total_payload_bytes: int
    """The sum over all ranks."""


class RankPlan(Part):
    """Load of one rank."""

    rank: int
    cost: float
    """Planned owner cost in FLOPs of Newton-Schulz (muon) and bytes moved (the rest), in one unit."""
    matrices: int
    """Matrices that this rank orthogonalises in a step."""
    resident_bytes: int
    """Parameters and optimizer state that stay on the rank between steps."""
    peak_bytes: int
    """Resident bytes plus the largest materialised units and their gradients."""


class DataPlan(Part):
    """What the corpus holds."""

    source: str
    files: int
    tokens: int
    samples_per_epoch: int


class CostPlan(Part):
    """What a step is predicted to take on the slowest rank, beside FSDP2 with AdamW on the same mesh. Seconds."""

    chip: str
    step_s: float
    adamw_step_s: float
    overhead_ratio: float
    """What a step costs more than AdamW's, over AdamW's."""
    compute_s: float
    """Forward and backward; the same for both."""
    update_s: float
    adamw_update_s: float
    ns_s: float
    """Newton-Schulz on the rank that has most of it."""
    ns_mean_s: float
    largest_matrix_s: float
    """Below which no number of workers brings ``ns_s``."""
    exposed_s: float
    """Communication that compute waits for."""
    adamw_exposed_s: float
    publish_exposed_s: float
    """The part of ``exposed_s`` that brings new weights to other replicas."""
    assumed: tuple[str, ...]
    """Figures of the chip that were not measured."""


class PlanReport(Part):
    """Everything that can be said about a job before it runs.

    Of a baseline (``muon``, ``adamw``) that is which optimizer trains which parameter: it has no owners, and torch
    decides what moves when. ``traffic`` and ``ranks`` are empty then, and what the runtime alone computes is None.
    """

    optimizer: Literal["dmuon", "muon", "adamw"] = "dmuon"
    plan_hash: str
    world_size: int
    parameters: tuple[ParameterPlan, ...]
    routes: tuple[RoutePlan, ...]
    traffic: tuple[TrafficPlan, ...]
    ranks: tuple[RankPlan, ...]
    predicted_imbalance: float | None
    """Largest planned cost over the mean."""
    ns_matrices: int | None
    """Matrices orthogonalised by all ranks in one step."""
    ns_flops: float | None
    """Newton-Schulz FLOPs of all ranks in one step, of the spec's steps, algorithm and restarts; symmetric products are
    charged half, and ``gram`` is the form that has fewer. Ownership is planned with five steps and one restart."""
    trainable_elements: int
    frozen_elements: int
    data: DataPlan
    tokens_per_step: int
    cost: CostPlan | None = None
    """None where no chip was named or the figures of this machine's are not known, and of a baseline."""
    warnings: tuple[str, ...] = ()
