"""Documents of kernels, breakers and swaps; part of :mod:`orchestrator.resources`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from orchestrator._resource import Resource
from worker.contract.kernels import Algorithm, BreakerState, CoefficientSet, Kernel, KernelTarget, SwapState

__all__ = [
    "BreakerChange", "BreakerResource", "BreakerWord", "KernelList", "KernelResource", "RuntimeBreaker", "SwapList",
    "SwapRequest", "SwapResource",
]  # fmt: skip

Why = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500)]
"""A reason, which blanks alone are not."""


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
    jobs: dict[str, BreakerState] = Field(default_factory=dict)
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
    reason: Why
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
    reason: Why
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
