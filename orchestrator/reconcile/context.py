"""What the passes of the reconciler share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.launcher_api import Launcher
from orchestrator.logs import LogStore
from orchestrator.planner import Planner
from orchestrator.reports import ReportStore
from orchestrator.store.database import Database
from orchestrator.store.jobs import JobLine
from orchestrator.store.models import Job
from orchestrator.store.transitions import Guard

__all__ = ["Context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Store, cluster, planner, time, and the name under which this control plane holds the lease."""

    database: Database
    launcher: Launcher
    planner: Planner
    clock: Clock
    holder: str
    changed: Callable[[], None]
    """Called after something was written that others may wait for."""
    checkpoints: Path | None = None
    """Where jobs keep checkpoints, each in a directory of its id, when their spec names no place; None: nowhere."""
    logs: LogStore | None = None
    """Where the ranks' output goes; None: it stays with Ray."""
    reports: ReportStore | None = None
    """Where attempts keep what they tell until it is stored; None: in memory alone."""

    def guard(self, job: Job | JobLine) -> Guard:
        """Return the guard of a write that was decided on ``job``."""
        return Guard(job.version, self.holder)
