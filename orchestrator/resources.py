"""Documents that the service answers with: the same classes on both sides of HTTP.

A float that is NaN or infinite is written as a string (``"NaN"``), since JSON has no such number.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator._admin_resources import (
    AuditEntry,
    AuditPage,
    Cause,
    CheckpointEntry,
    CheckpointList,
    Explanation,
    GpuHolder,
    GpuHolders,
    GpuNode,
    QuotaChange,
    QuotaList,
    QuotaResource,
    UsageFigures,
)
from orchestrator._kernel_resources import (
    BreakerChange,
    BreakerResource,
    BreakerWord,
    KernelList,
    KernelResource,
    RuntimeBreaker,
    SwapList,
    SwapRequest,
    SwapResource,
)
from orchestrator._log_resources import LogDropped, LogLine, LogPage
from orchestrator._resource import Resource
from worker.contract.errors import FieldError
from worker.contract.plan import ParameterPlan
from worker.contract.spec import JobSpec

__all__ = [
    "AttemptResource", "AuditEntry", "AuditPage", "BreakerChange", "BreakerResource", "BreakerWord", "Cause",
    "CheckpointEntry", "CheckpointList", "CommFigures", "ConditionResource", "ErrorGroup", "EventPage", "EventResource",
    "Explanation", "GpuHolder", "GpuHolders", "GpuNode", "JobPage", "JobResource", "JobSummary", "KernelList",
    "KernelResource", "LogDropped", "LogLine", "LogPage", "MetricsPage", "NsFigures", "PlanSummary", "Progress",
    "QuotaChange", "QuotaList", "QuotaResource", "RankFigures", "RankPace", "RanksResource", "Resource", "RouteFigures",
    "RoutesResource", "RuntimeBreaker", "StepPoint", "SwapList", "SwapRequest", "SwapResource", "UsageFigures",
    "Validation",
]  # fmt: skip

Value = str | int | float | bool | None


class Progress(Resource):
    """How far a job is, by its last reports."""

    step: int = 0
    first_step: int = 0
    """Step after which the last attempt began."""
    steps: int
    """Steps that the job is to do."""
    skipped_steps: int = 0
    loss: float | None = None
    tokens: int = 0
    tokens_per_second: float | None = None
    """All ranks' tokens over the time of the steps of rank 0, in the last attempt."""
    overlap_ratio: float | None = None
    """Share of the communication time that hid behind compute; absent without communication."""


class RankPace(Resource):
    """One rank of an attempt; what compares it with the others is absent for a baseline and before the first step."""

    rank: int
    step: int
    reported_at: float
    memory_bytes: int
    steps: int | None = None
    """Steps that the means are of."""
    own_seconds: float | None = None
    """Mean of a step without waiting for collectives: what this rank makes others wait for."""
    waited_seconds: float | None = None
    """Mean of a step spent waiting for collectives."""
    slowdown_ratio: float | None = None
    """``own_seconds`` over the median of all ranks."""


class RanksResource(Resource):
    """The ranks of a job's last attempt."""

    attempt: int | None
    ranks: tuple[RankPace, ...]


class ConditionResource(Resource):
    """What is known about one aspect of a job."""

    type: str
    status: str
    """``True``, ``False`` or ``Unknown``."""
    reason: str
    message: str
    since: float
    data: dict[str, Value] = Field(default_factory=dict)


class ErrorGroup(Resource):
    """The same error on one or more ranks of an attempt."""

    attempt: int
    type: str
    message: str
    ranks: tuple[int | None, ...]
    fields: dict[str, str] = Field(default_factory=dict)
    traceback: str = ""
    """Of the first rank."""


class AttemptResource(Resource):
    """One try to run the job. Times are seconds since the epoch."""

    number: int
    created_at: float
    launched_at: float | None
    formed_at: float | None
    ended_at: float | None
    end_reason: str | None
    end_message: str | None
    alive_ranks: int
    dropped_reports: int


class PlanSummary(Resource):
    """The figures of a plan without its tables."""

    plan_hash: str
    world_size: int
    trainable_elements: int
    frozen_elements: int
    ns_matrices: int | None
    """None with a baseline, as the next two."""
    ns_flops: float | None
    predicted_imbalance: float | None
    tokens_per_step: int
    warnings: tuple[str, ...] = ()


class JobSummary(Resource):
    """A job in a list."""

    id: str
    name: str
    project: str
    labels: dict[str, str]
    state: str
    reason: str | None
    blame: str | None
    message: str
    created_at: float
    state_since: float
    finished_at: float | None
    version: int


class JobResource(JobSummary):
    """A whole job."""

    errors: tuple[FieldError, ...] = ()
    """Why the document was refused."""
    rank_errors: tuple[ErrorGroup, ...] = ()
    attempts: tuple[AttemptResource, ...] = ()
    conditions: tuple[ConditionResource, ...] = ()
    spec: JobSpec
    """As it runs, with every default written out."""
    plan: PlanSummary | None = None
    progress: Progress

    @property
    def terminal(self) -> bool:
        """True when the job has ended."""
        return self.finished_at is not None


class JobPage(Resource):
    """A page of jobs, newest first."""

    jobs: tuple[JobSummary, ...]
    next_page_token: str | None = None


class EventResource(Resource):
    """Something that happened to a job."""

    seq: int
    at: float
    kind: str
    message: str
    data: dict[str, Value] = Field(default_factory=dict)


class EventPage(Resource):
    """Events in order; ``next_after`` is what to ask for next."""

    events: tuple[EventResource, ...]
    next_after: int


class CommFigures(Resource):
    """Communication of a route in a phase, summed over ranks, since the attempt began."""

    route: str
    phase: str
    collectives: int
    seconds: float
    exposed_seconds: float
    payload_bytes: int
    planned_bytes: int | None = None
    """By the plan, for the steps done."""


class NsFigures(Resource):
    """Newton-Schulz work that a kernel really did, summed over ranks."""

    kernel: str
    algorithm: str
    launches: int
    matrices: int
    seconds: float


class StepPoint(Resource):
    """A step as the ranks reported it; totals count from the start of the attempt."""

    step: int
    at: float
    loss: float
    grad_norm: float | None
    skipped: bool
    tokens: int
    """Read so far by the ranks that reported."""
    step_seconds: float
    """On the lowest rank that reported."""
    lr: dict[str, float]
    ranks: int
    """How many ranks reported this step."""
    comm: tuple[CommFigures, ...]
    ns: tuple[NsFigures, ...]


class MetricsPage(Resource):
    """Steps in order; ``next_after`` is what to ask for next."""

    attempt: int | None
    points: tuple[StepPoint, ...]
    next_after: int


class RouteFigures(Resource):
    """A route: what the plan says and what was measured."""

    route: str
    parameters: int
    elements: int
    comm: tuple[CommFigures, ...]
    comm_seconds: float | None
    """None with a baseline, as the next two: nothing counts what torch communicates."""
    exposed_seconds: float | None
    payload_bytes: int | None
    overlap_ratio: float | None


class RankFigures(Resource):
    """A rank's share of the owned work: planned cost next to measured seconds."""

    rank: int
    planned_cost: float
    planned_share: float
    planned_matrices: int
    compute_seconds: float | None
    measured_share: float | None


class RoutesResource(Resource):
    """The routing table of a job, and what really ran."""

    optimizer: str
    """``dmuon``, or the baseline ``muon`` or ``adamw``, whose routes say what trains a parameter and no more."""
    plan_hash: str
    attempt: int | None
    step: int
    """Up to which every rank has reported."""
    parameters: tuple[ParameterPlan, ...]
    routes: tuple[RouteFigures, ...]
    ranks: tuple[RankFigures, ...]
    ns: tuple[NsFigures, ...]
    ns_matrices: int | None
    """None with a baseline, as what was planned: torch counts none."""
    planned_ns_matrices: int | None
    verification: ConditionResource | None


class Validation(Resource):
    """The answer to ``validate_only``."""

    valid: Literal[True] = True
    spec: JobSpec
