"""One rank's report of one step, and whether it did what the plan says."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil
import torch

import dmuon_runtime as dmuon
from dmuon_runtime import ledger
from worker.contract.kernels import Kernel
from worker.contract.messages import (
    STEP_SECONDS_BUCKETS,
    CommTotals,
    Milestone,
    NsTotals,
    RankError,
    RankReport,
    RouteStats,
)
from worker.contract.spec import JobSpec, Route
from worker.kernels import launched_kernel
from worker.optimizers import Driver
from worker.planner import traffic_factor

__all__ = ["Ahead", "Reporter", "Sink", "StepFacts", "differences"]

MEMORY_EVERY_S = 1.0
Sink = Callable[[RankReport | Milestone | RankError], None]
"""Takes a message at once; it never waits for anyone."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What of a report is known before the device has done the step."""

    comm: tuple[CommTotals, ...]
    compared: dict[Kernel, int]
    memory_bytes: int
    lr: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the loop knows of a step when it is done; ``kernel`` is what the runtime's Newton-Schulz would launch."""

    step: int
    loss: float
    seconds: float
    tokens: int
    kernel: str | None
    kernel_epoch: int | None
    orthogonality_error: float | None
    ns_before: Mapping[tuple[str, str], ledger.NsCount]
    fallback_calls: int = 0
    offenders: tuple[str, ...] = ()


@dataclass(slots=True)
class Reporter:
    """Turns the runtime's counters into reports; totals are cumulative since it was made."""

    rank: int
    device: torch.device
    driver: Driver
    first_step: int = 0
    """Steps that were done before this reporter was made."""
    _skipped: int = 0
    _withheld: int = 0
    _tokens: int = 0
    _seconds: float = 0.0
    _buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_SECONDS_BUCKETS) + 1))
    _ns_start: dict[tuple[str, str], ledger.NsCount] = field(default_factory=ledger.snapshot)
    _compared_start: ledger.Launches = field(default_factory=ledger.LEDGER.compared)
    _process: psutil.Process = field(default_factory=psutil.Process)
    _memory: int = 0
    _memory_due: float = -math.inf

    def ahead(self) -> Ahead:
        """Return what can be said of a step once all of it was issued.

        For a host that is about to wait for the device: behind the wait the device stands still for a report.
        """
        counters = self.driver.counters()
        return Ahead(
            comm=() if counters is None else comm_totals(counters.comm),
            compared=self._compared(),
            memory_bytes=self._memory_bytes(),
            lr=self.driver.rates(),
        )

    def report(self, facts: StepFacts, ahead: Ahead) -> RankReport:
        """Return the report of a step that has just ended; ``ahead`` is of the same step."""
        last = self.driver.optimizer.last_step
        assert last is not None, "a step was done"
        self._skipped += last.skipped
        self._withheld += last.skipped and last.computed
        self._tokens += facts.tokens
        self._seconds += facts.seconds
        self._buckets[bisect.bisect_left(STEP_SECONDS_BUCKETS, facts.seconds)] += 1
        counts = ledger.snapshot()
        return RankReport(
            rank=self.rank,
            step=facts.step,
            first_step=self.first_step,
            at=time.time(),
            loss=facts.loss,
            grad_norm=last.grad_norm,
            skipped=last.skipped,
            skipped_total=self._skipped,
            withheld_total=self._withheld,
            tokens_total=self._tokens,
            step_seconds=facts.seconds,
            step_seconds_sum=self._seconds,
            step_seconds_buckets=tuple(self._buckets),
            comm=ahead.comm,
            ns=self._ns_totals(counts),
            owner_compute_seconds=self.driver.owner_compute_seconds(),
            ns_orthogonality_error=facts.orthogonality_error,
            routes=tuple(
                RouteStats.model_validate({"route": route, "update_square_sum": total, "elements": elements})
                for route, (total, elements) in last.updates.items()
            ),
            kernel=None if facts.kernel is None else Kernel(launched_kernel(facts.ns_before, counts) or facts.kernel),
            kernel_epoch=facts.kernel_epoch,
            fallback_calls=facts.fallback_calls,
            offenders=facts.offenders,
            compared_launches=ahead.compared,
            memory_bytes=ahead.memory_bytes,
            lr=ahead.lr,
        )

    def _compared(self) -> dict[Kernel, int]:
        found: dict[Kernel, int] = {}
        for key, number in ledger.LEDGER.compared().items():
            more = number - self._compared_start.get(key, 0)
            if more:
                found[Kernel(key[0])] = found.get(Kernel(key[0]), 0) + more
        return found

    def matrices(self) -> int:
        """Return the matrices that this rank has orthogonalised."""
        return sum(entry.matrices for entry in self._ns_totals(ledger.snapshot()))

    def _ns_totals(self, counts: Mapping[tuple[str, str], ledger.NsCount]) -> tuple[NsTotals, ...]:
        totals = []
        for (kernel, algorithm), count in counts.items():
            start = self._ns_start.get((kernel, algorithm), ledger.NsCount())
            if count == start:
                continue
            values = {
                "kernel": kernel,
                "algorithm": algorithm,
                "launches": count.launches - start.launches,
                "matrices": count.matrices - start.matrices,
                "seconds": count.seconds - start.seconds,
            }
            totals.append(NsTotals.model_validate(values))
        return tuple(entry for entry in totals if entry.launches or entry.matrices)

    def _memory_bytes(self) -> int:
        """Return what is held; a process is asked once in :data:`MEMORY_EVERY_S`, for a quick step would notice."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        now = time.monotonic()
        if now >= self._memory_due:
            self._memory_due, self._memory = now + MEMORY_EVERY_S, int(self._process.memory_info().rss)
        return self._memory


def comm_totals(comm: Mapping[tuple[Route, str], dmuon.CommCount]) -> tuple[CommTotals, ...]:
    """Return the runtime's communication counters as messages."""
    return tuple(
        CommTotals.model_validate(
            {
                "route": route,
                "phase": phase,
                "collectives": entry.collectives,
                "seconds": entry.seconds,
                "exposed_seconds": entry.exposed_seconds,
                "payload_bytes": entry.payload_bytes,
            }
        )
        for (route, phase), entry in comm.items()
    )


def differences(spec: JobSpec, plan: dmuon.RuntimePlan, rank: int, report: RankReport, steps: int) -> list[str]:
    """Compare what a rank counted in ``steps`` steps, none of them skipped, with the plan; empty when they agree."""
    found = []
    matrices = sum(entry.matrices for entry in report.ns)
    planned = plan.ranks[rank].matrices * steps
    if matrices != planned:
        found.append(f"orthogonalised {matrices} matrices, planned {planned}")
    done: dict[tuple[Route, str], tuple[int, int]] = {
        (entry.route, entry.phase): (entry.collectives, entry.payload_bytes) for entry in report.comm
    }
    expected = {
        (route, phase): (entry.collectives * times, entry.payload_bytes * times)
        for (route, phase), entry in plan.rank_traffic[rank].items()
        for times in [steps * traffic_factor(spec, phase)]
    }
    for key in sorted({*done, *expected}):
        if done.get(key, (0, 0)) != expected.get(key, (0, 0)):
            (ran, size), (wanted, planned_size) = done.get(key, (0, 0)), expected.get(key, (0, 0))
            found.append(f"{key[0]} {key[1]}: {ran} collectives of {size} bytes, planned {wanted} of {planned_size}")
    return found
