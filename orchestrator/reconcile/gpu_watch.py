"""Looking at who holds the GPUs of the cluster, now and then."""

from __future__ import annotations

import logging
import math

from orchestrator.errors import LauncherUnavailable
from orchestrator.gpus import GpuSight
from orchestrator.reconcile.context import Context
from orchestrator.store.attempts import last_attempts
from orchestrator.store.jobs import jobs_in
from worker.contract.gpus import attempt_mark
from worker.contract.states import JobState

__all__ = ["GpuWatch"]

_log = logging.getLogger(__name__)


class GpuWatch:
    """Asks every node that has GPUs, each ``every_s``. Nothing waits for a look, and none is decided on."""

    def __init__(self, context: Context, every_s: float) -> None:
        self._context, self._every_s = context, every_s
        self._next = -math.inf
        self._told: frozenset[str] = frozenset()
        self.sight: GpuSight | None = None
        """The last look; None before the first, and when the cluster could not be asked."""

    @property
    def due(self) -> bool:
        """Whether it is time for a look."""
        return self._context.clock() >= self._next

    def look(self) -> None:
        """Ask the cluster; what cannot be asked is not known any more."""
        at = self._context.clock()
        self._next = at + self._every_s
        before = self._live()
        try:
            looks = self._context.launcher.gpu_looks()
        except LauncherUnavailable as error:
            self.sight = None
            self._tell(frozenset({f"nobody knows who holds the GPUs: {error}"}))
            return
        self.sight = GpuSight(at=at, looks=looks, live=before | self._live())
        unseen = [look for look in looks if look.problem]
        self._tell(frozenset(f"GPUs of node {look.node} are not seen: {look.problem}" for look in unseen))

    def _live(self) -> frozenset[str]:
        """Marks of the attempts that have not ended."""
        with self._context.database.read() as session:
            jobs = jobs_in(session, JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
            attempts = last_attempts(session, [job.id for job in jobs]).values()
            return frozenset(attempt_mark(row.job_id, row.number) for row in attempts if row.ended_at is None)

    def _tell(self, problems: frozenset[str]) -> None:
        """Log what was no problem at the look before."""
        for problem in sorted(problems - self._told):
            _log.warning("%s", problem)
        self._told = problems
