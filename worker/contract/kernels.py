"""Kernels and breakers by name: the vocabulary of the spec, the endpoint, the worker and the metrics."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["FALLBACK_KERNEL", "Algorithm", "BreakerState", "Kernel", "KernelAvailability", "KernelPolicy"]


class Algorithm(StrEnum):
    """The form of the Newton-Schulz iteration."""

    GRAM = "gram"
    DIRECT = "direct"


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


class KernelPolicy(BaseModel):
    """What an attempt may launch from the next step on. A higher epoch replaces a lower one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: int = Field(default=0, ge=0)
    tripped: frozenset[Kernel] = frozenset()
    """Kernels whose work goes to :data:`FALLBACK_KERNEL`."""


class KernelAvailability(BaseModel):
    """Whether a machine can run a kernel, and why not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: Kernel
    available: bool
    detail: str
    """What it is, or what to install."""
