"""Kernels and breakers by name: the vocabulary of the spec, the endpoint, the worker and the metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "FALLBACK_KERNEL", "Algorithm", "BreakerState", "CoefficientSet", "Kernel", "KernelAvailability", "KernelPolicy",
    "KernelTarget", "SwapOrder", "SwapState",
]  # fmt: skip


class Algorithm(StrEnum):
    """The form of the Newton-Schulz iteration."""

    GRAM = "gram"
    DIRECT = "direct"


class CoefficientSet(StrEnum):
    """Coefficients of the Newton-Schulz polynomials by name."""

    POLAR_EXPRESS = "polar_express"
    YOU = "you"
    KELLER_JORDAN = "keller_jordan"


class Kernel(StrEnum):
    """What computes the symmetric products of Newton-Schulz."""

    AUTO = "auto"
    QUACK = "quack"
    CUTE_SM80 = "cute_sm80"
    BLOCKED = "blocked"
    CUBLAS = "cublas"


FALLBACK_KERNEL = Kernel.CUBLAS
"""torch's own matrix products: runs on every device, so it has no breaker of its own."""


class BreakerState(StrEnum):
    """What may run in place of a kernel."""

    CLOSED = "closed"
    """The kernel runs where it was chosen."""
    OPEN = "open"
    """It tripped by itself: the fallback runs and the job goes on."""
    HALF_OPEN = "half_open"
    """It is being tried beside the fallback, whose result is applied."""
    FORCED_OPEN = "forced_open"
    """An operator pinned the fallback."""
    DISABLED = "disabled"
    """An operator pinned the kernel: it does not trip."""
    METRICS_ONLY = "metrics_only"
    """Failures are counted and nothing trips."""


class KernelTarget(BaseModel):
    """What Newton-Schulz is to be done with; what is absent stays as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: Kernel | None = None
    algorithm: Algorithm | None = None
    coefficients: CoefficientSet | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.kernel is None and self.algorithm is None and self.coefficients is None:
            raise ValueError("at least one of kernel, algorithm and coefficients is needed, found none")
        return self

    def over(self, other: KernelTarget | None) -> KernelTarget:
        """Return this target with what it leaves open taken from ``other``."""
        mine = self.model_dump(exclude_none=True)
        return self if other is None else KernelTarget.model_validate(other.model_dump(exclude_none=True) | mine)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.model_dump(exclude_none=True).items())


class SwapState(StrEnum):
    """How far the swap of a running job's kernel is."""

    REQUESTED = "requested"
    """It stands in the store; the job has not heard of it."""
    PREPARING = "preparing"
    """Its ranks get ready beside their steps; all train as before."""
    PREPARED = "prepared"
    """All ranks were ready and changed at one step; what each of them launched then is being compared."""
    COMMITTED = "committed"
    """Every rank launched in that step what was asked for."""
    ROLLED_BACK = "rolled_back"
    """A rank refused, was late or launched something else: all ranks run what they ran before."""
    FAILED = "failed"
    """The attempt ended before the outcome was known; the next one runs what ran before."""

    @property
    def final(self) -> bool:
        """True when nothing more will happen."""
        return self in (SwapState.COMMITTED, SwapState.ROLLED_BACK, SwapState.FAILED)


class SwapOrder(BaseModel):
    """A swap that a running attempt is to carry out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1)
    """Of the operator's word, in one order with the epochs of policies."""
    target: KernelTarget
    deadline_s: float = Field(default=120.0, gt=0)
    """Time for all ranks to prepare."""


class KernelPolicy(BaseModel):
    """What an attempt may launch from the next step on. A higher epoch replaces a lower one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: int = Field(default=0, ge=0)
    tripped: frozenset[Kernel] = frozenset()
    """Kernels whose work goes to :data:`FALLBACK_KERNEL`."""
    disabled: frozenset[Kernel] = frozenset()
    """Kernels that run whatever happens."""
    metrics_only: frozenset[Kernel] = frozenset()
    """Kernels whose failures are counted and trip nothing."""
    resets: dict[Kernel, int] = {}
    """Epoch of the last reset of a kernel: what tripped by itself before is closed again."""
    target: KernelTarget | None = None
    """What earlier swaps of this job came to; it holds from the start of an attempt."""
    swap: SwapOrder | None = None
    """The swap that is under way."""

    def same_breakers(self, other: KernelPolicy) -> bool:
        """True when the two differ in nothing that a breaker does."""
        names = ("tripped", "disabled", "metrics_only", "resets")
        return all(getattr(self, name) == getattr(other, name) for name in names)


class KernelAvailability(BaseModel):
    """Whether a machine can run a kernel, and why not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: Kernel
    available: bool
    detail: str
    """What it is, or what to install."""
