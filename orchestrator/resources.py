"""Documents that the service answers with: the same classes on both sides of HTTP.

A float that is NaN or infinite is written as a string (``"NaN"``), since JSON has no such number.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from worker.contract.errors import FieldError
from worker.contract.kernels import Algorithm, BreakerState, CoefficientSet, Kernel, KernelTarget, SwapState
from worker.contract.plan import ParameterPlan
from worker.contract.spec import JobSpec

__all__ = [
    "AttemptResource", "BreakerChange", "BreakerResource", "BreakerWord", "CommFigures", "ConditionResource",
    "ErrorGroup", "EventPage", "EventResource", "JobPage", "JobResource", "JobSummary", "KernelList", "KernelResource",
    "MetricsPage", "NsFigures", "PlanSummary", "Progress", "RankFigures", "RouteFigures", "RoutesResource",
    "RuntimeBreaker", "StepPoint", "SwapList", "SwapRequest", "SwapResource", "Validation",
]  # fmt: skip

Value = str | int | float | bool | None


class Resource(BaseModel):
    """Base: frozen; unknown fields are passed over, so that an old client survives a new server."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Progress(Resource):
    """How far a job is, by its last reports."""

    step: int = 0
    steps: int
    """Steps that the job is to do."""
    skipped_steps: int = 0
    loss: float | None = None
    tokens: int = 0
    tokens_per_second: float | None = None
    """All ranks' tokens over the time of the steps of rank 0, in the last attempt."""
    overlap_ratio: float | None = None
    """Share of the communication time that hid behind compute; absent without communication."""


class ConditionResource(Resource):
    """What is known about one aspect of a job."""

    type: str
    status: str
    """``True``, ``False`` or ``Unknown``."""
    reason: str
    message: str
    since: float
    data: dict[str, Value] = {}


class ErrorGroup(Resource):
    """The same error on one or more ranks of an attempt."""

    attempt: int
    type: str
    message: str
    ranks: tuple[int | None, ...]
    fields: dict[str, str] = {}
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
    ns_matrices: int
    ns_flops: float
    predicted_imbalance: float
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
    data: dict[str, Value] = {}


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
    comm_seconds: float
    exposed_seconds: float
    payload_bytes: int
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

    plan_hash: str
    attempt: int | None
    step: int
    """Up to which every rank has reported."""
    parameters: tuple[ParameterPlan, ...]
    routes: tuple[RouteFigures, ...]
    ranks: tuple[RankFigures, ...]
    ns: tuple[NsFigures, ...]
    ns_matrices: int
    planned_ns_matrices: int
    verification: ConditionResource | None


class KernelResource(Resource):
    """A kernel: whether it can run here, and its breaker."""

    kernel: Kernel
    available: bool | None
    """None when nobody could be asked."""
    detail: str
    breaker: BreakerState | None
    """None for kernels that have none."""


class KernelList(Resource):
    """All kernels."""

    kernels: tuple[KernelResource, ...]


class RuntimeBreaker(Resource):
    """A breaker of a live job that moved by itself: of a kernel, for short sides up to ``size_class``, in a dtype."""

    job: str
    attempt: int
    size_class: int
    dtype: str
    state: BreakerState
    reason: str
    step: int
    at: float


class BreakerWord(Resource):
    """Something that an operator said of a kernel."""

    epoch: int
    scope: str
    from_state: str
    to_state: str
    reason: str
    actor: str
    at: float


class BreakerResource(Resource):
    """The breaker of a kernel; ``jobs`` holds the states of jobs that differ from ``state``."""

    kernel: Kernel
    state: BreakerState
    reason: str
    actor: str
    changed_at: float | None
    epoch: int
    jobs: dict[str, BreakerState] = {}
    expires_at: float | None = None
    runtime: tuple[RuntimeBreaker, ...] = ()
    history: tuple[BreakerWord, ...] = ()
    """The last words, newest first."""


class BreakerChange(BaseModel):
    """What an operator wants of a breaker."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"action": "trip", "reason": "slow on long rows", "scope": "all"}]},
    )

    action: Literal["trip", "reset", "force", "disable", "observe"]
    """``trip`` and ``force`` pin the fallback; ``reset`` lets the kernel run and trip again, and closes what tripped by
    itself; ``disable`` pins the kernel, whatever happens, and must expire; ``observe`` counts failures and trips on
    none."""
    reason: str = Field(min_length=1, max_length=500)
    scope: str = "all"
    """``all`` (jobs that live and jobs to come), or the id of a job."""
    expires_in_s: Annotated[float, Field(gt=0, le=30 * 86_400)] | None = None
    """After which the breaker is closed again; None: not before somebody says so."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.action == "disable" and self.expires_in_s is None:
            raise ValueError("disable needs expires_in_s: a kernel that cannot trip is not to be forgotten")
        if self.action == "reset" and self.expires_in_s is not None:
            raise ValueError("reset cannot expire; leave expires_in_s out")
        return self


class SwapRequest(BaseModel):
    """What a running job's Newton-Schulz is to be done with; what is absent stays as it is."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"kernel": "quack", "reason": "a better one was installed"}]},
    )

    kernel: Kernel | None = None
    algorithm: Algorithm | None = None
    coefficients: CoefficientSet | None = None
    reason: str = Field(min_length=1, max_length=500)
    expected_epoch: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Refuse the swap unless this is the number of the last word on this job's kernels."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.kernel is None and self.algorithm is None and self.coefficients is None:
            raise ValueError("at least one of kernel, algorithm and coefficients is needed, found none")
        return self

    @property
    def target(self) -> KernelTarget:
        """What is asked for."""
        return KernelTarget(kernel=self.kernel, algorithm=self.algorithm, coefficients=self.coefficients)


class SwapResource(Resource):
    """A swap of a running job's kernel: who asked for it and why, and what came of it."""

    id: str
    job: str
    attempt: int
    number: int
    target: KernelTarget
    state: SwapState
    reason: str
    actor: str
    requested_at: float
    changed_at: float
    epoch: int | None
    """Of the ranks, once they changed."""
    step: int | None
    """The first that the new kernel did."""
    message: str
    """What the ranks said."""

    @property
    def final(self) -> bool:
        """True when nothing more will happen."""
        return self.state.final


class SwapList(Resource):
    """A job's swaps, oldest first."""

    swaps: tuple[SwapResource, ...]


class Validation(Resource):
    """The answer to ``validate_only``."""

    valid: Literal[True] = True
    spec: JobSpec
