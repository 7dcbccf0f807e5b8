"""What workers tell their supervisor, what the control plane pulls from it, and what it may ask for.

Totals are cumulative since the attempt began, so a report that is read twice or never changes no sum.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from worker.contract.errors import ErrorValue, Words
from worker.contract.kernels import Algorithm, Kernel, KernelPolicy
from worker.contract.plan import Phase
from worker.contract.spec import Route
from worker.contract.states import Reason

__all__ = [
    "STEP_SECONDS_BUCKETS", "AttemptEnd", "AttemptStart", "CommTotals", "Entry", "Milestone", "NsTotals", "PollBatch",
    "RankError", "RankReport", "RouteStats", "StopRequest",
]  # fmt: skip

STEP_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds, in seconds, of the step histogram; one more bucket holds the rest."""


class Message(BaseModel):
    """Base of all messages: frozen, no unknown fields, NaN and infinity kept as they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class CommTotals(Message):
    """Communication of one route in one phase on one rank."""

    route: Route
    phase: Phase
    collectives: int
    seconds: float
    """Time between start and end of the collectives."""
    exposed_seconds: float
    """The part of it for which compute waited."""
    payload_bytes: int


class NsTotals(Message):
    """Newton-Schulz work that one kernel really did on one rank."""

    kernel: Kernel
    algorithm: Algorithm
    launches: int
    """Matrix products launched, counted at the place of launch."""
    matrices: int
    """Matrices orthogonalised."""
    seconds: float


class RouteStats(Message):
    """How large the last update of a route was on one rank."""

    route: Route
    update_square_sum: float
    """Sum of squares of the change of the weights this rank updated, before weight decay."""
    elements: int
    """Number of those weights."""


class RankReport(Message):
    """One rank after one optimizer step."""

    kind: Literal["rank_report"] = "rank_report"
    rank: int
    step: int
    """Steps done, counted from 1, those of earlier attempts included."""
    first_step: int = 0
    """Steps that were done before this attempt: it resumed there, and its totals count from there."""
    at: float
    """Wall clock, seconds since the epoch."""
    loss: float
    """Mean over the global batch, in nats a token; the same on every rank."""
    grad_norm: float | None
    """Global norm over all routes before clipping; None when it was not computed."""
    skipped: bool
    """True when a non-finite gradient made all ranks skip the update."""
    skipped_total: int
    withheld_total: int = 0
    """Of the skipped steps, those that were computed all the same: a GPU withholds an update by itself."""
    tokens_total: int
    """Tokens that this rank has read."""
    step_seconds: float
    step_seconds_sum: float
    step_seconds_buckets: tuple[int, ...]
    """Counts by :data:`STEP_SECONDS_BUCKETS`, not cumulative over buckets, one more for the rest."""
    comm: tuple[CommTotals, ...]
    ns: tuple[NsTotals, ...]
    owner_compute_seconds: float | None
    """None with a baseline, which has no owners."""
    ns_orthogonality_error: float | None
    """Bound on the deviation from 1 of a squared singular value of a sampled update, at most 2 % above the largest;
    None before the first sample."""
    routes: tuple[RouteStats, ...]
    kernel: Kernel | None
    """What the runtime launched in this step (``auto`` resolved); None with a baseline, which launches torch's own."""
    kernel_epoch: int | None
    fallback_calls: int = 0
    """Newton-Schulz calls of this rank whose kernel failed, and that the fallback did instead."""
    compared_launches: dict[Kernel, int] = {}
    """Launches whose results were only compared with another kernel's; they are not in :attr:`ns`."""
    offenders: tuple[str, ...] = ()
    """What this rank launched that was not chosen, and parameters whose matrices were not orthogonalised as planned, in
    words; once there is something it stays."""
    memory_bytes: int
    """Resident set of the process, or memory allocated on its GPU."""
    lr: dict[str, float]
    """Learning rate of this step by route."""

    @property
    def steps_done(self) -> int:
        """Steps of this attempt alone, which its totals are of."""
        return self.step - self.first_step


class Milestone(Message):
    """Something that happened once in an attempt."""

    kind: Literal["milestone"] = "milestone"
    name: Literal[
        "placed",
        "workers_started",
        "group_formed",
        "plan_confirmed",
        "routes_verified",
        "kernel_changed",
        "stopping",
        "stalled",
        "stacks",
        "kernel_failed",
        "breaker_changed",
        "swap_preparing",
        "swap_refused",
        "swap_prepared",
        "swap_committed",
        "swap_rolled_back",
        "resumed",
        "checkpoint_saved",
        "checkpoint_failed",
        "checkpoint_passed_over",
        "checkpoints_off",
        "logs_off",
        "reports_off",
    ]
    at: float
    message: Words
    rank: int | None = None
    data: dict[str, Words | int | float | bool | None] = {}


class RankError(Message):
    """A rank ended with an exception."""

    kind: Literal["rank_error"] = "rank_error"
    at: float
    error: ErrorValue


class AttemptEnd(Message):
    """The attempt is over: its processes and its placement group are verified gone. Always the last entry."""

    kind: Literal["end"] = "end"
    at: float
    reason: Reason
    message: Words


class Entry(Message):
    """One item of a supervisor's outbox."""

    seq: int
    """Consecutive from 1."""
    rank: int | None = None
    """Who told it; None: the supervisor itself."""
    number: int | None = None
    """What that rank has told before it, counted from 1, this one included: told twice, it is taken once."""
    body: Annotated[RankReport | Milestone | RankError | AttemptEnd, Field(discriminator="kind")]


class PollBatch(Message):
    """What a poll returns."""

    entries: tuple[Entry, ...]
    dropped: int
    """Entries that left the bounded outbox before anyone read them."""
    alive_ranks: int
    ended: bool


class StopRequest(Message):
    """End an attempt, gracefully for ``patience_s`` seconds, then by force."""

    reason: Reason
    message: Words
    patience_s: float = 10.0


class AttemptStart(Message):
    """All that a supervisor needs to run one attempt."""

    job_id: str
    attempt: int
    fence: str
    """Token that every call of this attempt carries; another one is refused."""
    spec_json: str
    plan_hash: str
    kernels: KernelPolicy = KernelPolicy()
    checkpoint_directory: str = ""
    """Where the job's checkpoints go when its spec names no place; empty: nowhere."""
    log_directory: str = ""
    """Where the ranks' output goes, as :mod:`worker.contract.logs` says; empty: it stays where Ray sends it."""
    log_quota_bytes: int = 32 << 20
    """Of each stream of each rank; what is above it is dropped and counted."""
    report_directory: str = ""
    """Where what is told is kept until it is stored, as :mod:`worker.contract.reports` says; empty: in memory alone."""
    placement_deadline_s: float = 60.0
    outbox_limit: int = 100_000
