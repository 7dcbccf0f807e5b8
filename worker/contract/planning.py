"""Request and answer of the planner, which runs in a process of its own: ``python -m worker plan --serve``.

The process reads one request a line from standard input and writes one answer a line to standard output.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from worker.contract.errors import ErrorValue, FieldError
from worker.contract.kernels import KernelAvailability
from worker.contract.plan import PlanReport

__all__ = ["PlanAnswer", "PlanRequest"]


class PlanRequest(BaseModel):
    """Plan a spec, or (without one) say what this machine's kernels are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec_json: str | None = None
    chip: str | None = None
    """Of which the cost of a step is to be predicted; None: of this machine's, where its figures are known."""


class PlanAnswer(BaseModel):
    """Exactly one of the fields is set, ``errors`` counting as set when it is not empty."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: PlanReport | None = None
    errors: tuple[FieldError, ...] = ()
    """Why the plan was refused."""
    kernels: tuple[KernelAvailability, ...] | None = None
    failure: ErrorValue | None = None
    """The planner itself failed: our bug, not the user's."""
