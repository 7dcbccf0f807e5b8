"""Documents for who runs the service: quotas, GPUs, the record of changes, and why a job is where it is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from orchestrator._resource import Resource

__all__ = [
    "AuditEntry", "AuditPage", "Cause", "CheckpointEntry", "CheckpointList", "Explanation", "GpuHolder", "GpuHolders",
    "GpuNode", "QuotaChange", "QuotaList", "QuotaResource", "UsageFigures",
]  # fmt: skip

_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=0, le=2**62)]


class QuotaChange(Resource):
    """What a project may use at once; a bound that is left out, or null, is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: _Amount | None = None
    gpus: _Amount | None = None
    memory_bytes: _Bytes | None = None
    jobs: _Count | None = None
    """Jobs that hold resources."""
    waiting_jobs: _Count | None = None
    """Jobs that wait; one more is refused."""


class UsageFigures(Resource):
    """What a project's jobs hold or were promised."""

    cpus: float
    gpus: float
    memory_bytes: float
    jobs: int


class QuotaResource(QuotaChange):
    """A quota. ``*`` counts for each project that has none of its own."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    project: str
    version: int
    actor: str
    changed_at: float


class QuotaList(Resource):
    """All quotas, and what every project with jobs uses."""

    quotas: tuple[QuotaResource, ...]
    used: dict[str, UsageFigures]


class GpuNode(Resource):
    """A node with GPUs, as the last look saw it."""

    node: str
    gpus: tuple[int, ...]
    """Indices of the GPUs that were seen."""
    problem: str
    """Why it, or some of its GPUs, could not be seen; empty when all of them were."""


class GpuHolder(Resource):
    """A process that holds memory of a GPU."""

    node: str
    gpu: int
    uuid: str
    pid: int
    """0 where the driver names none."""
    bytes: int | None
    user: str
    command: str
    started_at: float | None
    standing: Literal["live", "stray", "unknown"]
    """Of an attempt that lives; of none; not to be told."""
    why: str


class GpuHolders(Resource):
    """Who holds the GPUs of the cluster. ``at`` is None when nobody could look."""

    at: float | None = None
    nodes: tuple[GpuNode, ...] = ()
    holders: tuple[GpuHolder, ...] = ()


class AuditEntry(Resource):
    """A request that was to change something."""

    number: int
    at: float
    actor: str
    """Name of the token, which tells nothing of it."""
    action: str
    """Method and path."""
    target: str
    """Id of the job, or what else was to be changed."""
    request_hash: str
    """SHA-256 over method, path, query and body."""
    outcome: str
    """Status of the answer, or the code of the refusal."""


class AuditPage(Resource):
    """Entries, newest first; ``next_before`` is what to ask for next."""

    entries: tuple[AuditEntry, ...]
    next_before: int | None = None


class CheckpointEntry(Resource):
    """A checkpoint that a job has saved; older ones may have been removed since."""

    step: int | None
    attempt: int | None
    at: float
    path: str
    bytes: int | None
    seconds: float | None
    present: bool | None
    """Whether it is there now; None when that cannot be seen from here."""


class CheckpointList(Resource):
    """A job's checkpoints, newest first."""

    checkpoints: tuple[CheckpointEntry, ...]


class Cause(Resource):
    """One thing that is known about why a job is where it is."""

    code: str
    message: str
    since: float | None = None
    cure: str = ""


class Explanation(Resource):
    """Why a job waits, is slow, was restarted or has ended, from what was recorded."""

    job: str
    state: str
    since: float
    summary: str
    causes: tuple[Cause, ...]
    ahead: int | None = None
    """Jobs before it in the queue; None when it is in none."""
