"""What a project may use at once, and what it uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.launcher_api import Resources

__all__ = ["Quota", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a project may use at once; None is no bound."""

    cpus: float | None = None
    gpus: float | None = None
    memory_bytes: float | None = None
    jobs: int | None = None
    """Jobs that hold resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a project uses."""

    resources: Resources = field(default_factory=Resources)
    jobs: int = 0

    def plus(self, resources: Resources) -> Usage:
        """Return the usage with one job more."""
        return Usage(resources=self.resources + resources, jobs=self.jobs + 1)
