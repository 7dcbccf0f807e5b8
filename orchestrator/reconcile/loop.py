"""The reconciler's threads: one plans, one does all the rest. Both only while this control plane holds the lease."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.errors import LauncherUnavailable, LeaseLost
from orchestrator.launcher_api import Capacity, Launcher
from orchestrator.logs import LogStore
from orchestrator.planner import Planner
from orchestrator.reconcile._drivers import Drivers
from orchestrator.reconcile.admission import admit_queued
from orchestrator.reconcile.attempts import drive_attempt
from orchestrator.reconcile.context import Context
from orchestrator.reconcile.gpu_watch import GpuWatch
from orchestrator.reconcile.planning import plan_submitted
from orchestrator.reconcile.preemption import preempt_for_priority
from orchestrator.reconcile.succession import queue_restarts
from orchestrator.reports import ReportStore
from orchestrator.store.database import Database
from orchestrator.store.idempotency import forget_old
from orchestrator.store.jobs import jobs_in
from orchestrator.store.kernels import breaker_rows, expire_breakers
from orchestrator.store.leases import acquire, release
from orchestrator.store.pruning import old_jobs, prune_audit, prune_job
from orchestrator.store.transitions import LEASE
from worker.contract.states import JobState

__all__ = ["Reconciler"]

_log = logging.getLogger(__name__)
_SWEEP_S = 3600.0
_PRUNED_AT_ONCE = 20
_REST = 2.0
"""Pause after a pass, in terms of the CPU time that it took."""
_DRIVERS = 8
_CAPACITY_S = 10.0
"""How often the cluster's capacity is looked at for those who watch; admission asks for itself."""
_LOOK, _GPUS = "capacity", "gpus"
"""Stand among the ids of driven jobs: a cluster that does not say what it has holds up no job."""


class Reconciler:
    """Brings what runs and what is stored together, again and again."""

    def __init__(
        self,
        database: Database,
        launcher: Launcher,
        planner: Planner,
        clock: Clock,
        *,
        interval_s: float = 0.25,
        lease_s: float = 5.0,
        patience_s: float = 1.0,
        changed: Callable[[], None] = lambda: None,
        timed: Callable[[float], None] = lambda _seconds: None,
        checkpoints: Path | None = None,
        logs: LogStore | None = None,
        reports: ReportStore | None = None,
        history_s: float = math.inf,
        gpu_look_s: float = 60.0,
    ) -> None:
        self.context = Context(
            database=database, launcher=launcher, planner=planner, clock=clock, holder=secrets.token_hex(8),
            changed=changed, checkpoints=checkpoints, logs=logs, reports=reports,
        )  # fmt: skip
        self._interval_s, self._lease_s, self._timed = interval_s, lease_s, timed
        self._history_s, self._patience_s = history_s, patience_s
        self._stop = threading.Event()
        self._wake = (threading.Event(), threading.Event())
        self._threads: list[threading.Thread] = []
        self._drivers = Drivers(_DRIVERS)
        self._driven: dict[str, Future[None]] = {}
        self._next_sweep, self._next_look, self._renew_at = 0.0, -math.inf, -math.inf
        self.last_pass_at: float | None = None
        """Wall clock at the end of the last pass; None before the first."""
        self.capacity: Capacity | None = None
        """What the cluster was last seen to have; None when it could not be asked."""
        self.gpus = GpuWatch(self.context, gpu_look_s)

    def start(self) -> None:
        """Begin; the threads end by :meth:`stop`."""
        passes = (self.run_once, self.plan_once)
        for name, once, wake in zip(("reconcile", "plan"), passes, self._wake, strict=True):
            thread = threading.Thread(target=self._loop, args=(once, wake), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def wake(self) -> None:
        """Do the next pass now."""
        for event in self._wake:
            event.set()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the threads and give the lease back. A call that is still in progress is left to its own time limit."""
        self._stop.set()
        self.wake()
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        self._drivers.stop()
        with self.context.database.write() as session:
            release(session, LEASE, self.context.holder)

    def run_once(self) -> None:
        """Admit, then drive every attempt."""
        if not self._has_lease():
            return
        began = time.perf_counter()
        self._expire()
        queue_restarts(self.context)
        admit_queued(self.context)
        preempt_for_priority(self.context)  # for what is still there, and not held back by a quota
        self._drive_all()
        self._sweep()
        self.last_pass_at = self.context.clock()
        self._timed(time.perf_counter() - began)

    def _drive_all(self) -> None:
        """Drive every attempt beside the others; one whose supervisor hangs is left to its own next time."""
        with self.context.database.read() as session:
            jobs = jobs_in(session, JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
        for job in jobs:
            if job.id not in self._driven:
                self._driven[job.id] = self._drivers.submit(partial(drive_attempt, self.context, job.id))
        if _LOOK not in self._driven and self.context.clock() >= self._next_look:
            self._driven[_LOOK] = self._drivers.submit(self._look_at_capacity)
        if _GPUS not in self._driven and self.gpus.due:
            self._driven[_GPUS] = self._drivers.submit(self.gpus.look)
        # A pass that is made by hand has nobody who would make the next one: it is waited for.
        awaited = [one for key, one in self._driven.items() if key != _GPUS or not self._threads]
        wait(awaited, timeout=self._patience_s if self._threads else None)
        for job_id, future in [(key, one) for key, one in self._driven.items() if one.done()]:
            del self._driven[job_id]
            error = None if future.cancelled() else future.exception()
            if isinstance(error, LeaseLost):
                raise error
            if error is not None:
                what = "the cluster" if job_id in (_LOOK, _GPUS) else f"job {job_id}"
                _log.error("%s could not be driven; the next pass tries again", what, exc_info=error)

    def plan_once(self) -> None:
        """Plan what was submitted."""
        if self._has_lease() and plan_submitted(self.context):
            for event in self._wake:
                event.set()  # what is planned can be admitted, and more may wait for a plan

    def _has_lease(self) -> bool:
        context, now = self.context, self.context.clock()
        if self._renew_at - self._lease_s <= now < self._renew_at:
            return True
        with context.database.write() as session:
            held = acquire(session, LEASE, context.holder, now=now, duration_s=self._lease_s)
        self._renew_at = now + self._lease_s / 3 if held else -math.inf
        return held

    def _look_at_capacity(self) -> None:
        self._next_look = self.context.clock() + _CAPACITY_S
        try:
            self.capacity = self.context.launcher.capacity()
        except LauncherUnavailable as error:
            self.capacity = None
            _log.warning("the cluster's capacity is not known: %s", error)

    def _expire(self) -> None:
        with self.context.database.read() as session:
            now = self.context.clock()
            due = any(row.expires_at is not None and row.expires_at <= now for row in breaker_rows(session))
        if due:
            with self.context.database.write() as session:
                expire_breakers(session, now=now)
            self.context.changed()

    def _sweep(self) -> None:
        now = self.context.clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_S
        with self.context.database.write() as session:
            forget_old(session, now=now)
            prune_audit(session, before=now - 4 * self._history_s)
        with self.context.database.read() as session:
            old = old_jobs(session, ended_before=now - self._history_s, limit=_PRUNED_AT_ONCE)
        for job_id in old:
            if self.context.logs is not None:
                self.context.logs.remove(job_id)
            if self.context.reports is not None:
                self.context.reports.remove(job_id)
            with self.context.database.write() as session:
                prune_job(session, job_id, now=now)
        if len(old) == _PRUNED_AT_ONCE:
            self._next_sweep = now  # the next pass goes on

    def _loop(self, once: Callable[[], None], wake: threading.Event) -> None:
        while not self._stop.is_set():
            began = time.thread_time()
            try:
                once()
            except LeaseLost as lost:
                self._renew_at = -math.inf
                _log.warning("%s", lost)
            except Exception:
                _log.exception("a pass of the reconciler failed; the next one tries again")
            # However often it is woken, two thirds of the time are left to those who ask.
            self._stop.wait(min(1.0, _REST * (time.thread_time() - began)))
            wake.wait(self._interval_s)
            wake.clear()
