"""A planner, a cluster and a clock that tests drive by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.errors import LauncherUnavailable, PlanRefusedProblem, SupervisorGone
from orchestrator.launcher_api import AttemptRef, Capacity, Resources
from worker.contract.errors import ErrorValue, FieldError
from worker.contract.gpus import GpuLook
from worker.contract.kernels import Algorithm, Kernel, KernelAvailability, KernelPolicy
from worker.contract.messages import (
    STEP_SECONDS_BUCKETS,
    AttemptEnd,
    AttemptStart,
    CommTotals,
    Entry,
    Milestone,
    NsTotals,
    PollBatch,
    RankError,
    RankReport,
    RouteStats,
    StopRequest,
)
from worker.contract.plan import CostPlan, DataPlan, ParameterPlan, PlanReport, RankPlan, RoutePlan, TrafficPlan
from worker.contract.spec import JobSpec
from worker.contract.states import Reason

__all__ = [
    "FakeAttempt", "FakeClock", "FakeLauncher", "FakePlanner", "make_baseline_report", "make_plan", "make_report",
    "make_spec",
]  # fmt: skip

MATRICES, FORWARD, REDUCE = 3, 1000, 500
"""Of the plan that :func:`make_plan` returns: matrices a step, bytes a rank and step by phase."""


class FakeClock:
    """Time that moves when it is told to."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_spec(**changes: object) -> JobSpec:
    """A valid spec with two workers."""
    document: dict[str, object] = {
        "api_version": "v1",
        "name": "tiny",
        "model": {"type": "llama", "config": {"hidden_size": 16}},
        "data": {"sequence_length": 8},
        "mesh": {"shard": 2},
        "training": {"steps": 5, "global_batch": 4},
    }
    return JobSpec.model_validate(document | changes)


def make_plan(spec: JobSpec, plan_hash: str = "plan-1") -> PlanReport:
    """A plan with one muon and one adamw parameter."""
    world = spec.world_size
    parameters = (
        ParameterPlan(name="w", shape=(4, 4), elements=16, route="muon", rule="defaults", owner=0, unit="m"),
        ParameterPlan(name="b", shape=(4,), elements=4, route="adamw", rule="overrides[0]", owner=1, unit="m"),
    )
    return PlanReport(
        plan_hash=plan_hash,
        world_size=world,
        parameters=parameters,
        routes=(
            RoutePlan(route="muon", parameters=1, elements=16),
            RoutePlan(route="adamw", parameters=1, elements=4),
        ),
        traffic=(
            TrafficPlan(
                route="muon", phase="forward", collectives=1, payload_bytes=FORWARD, total_payload_bytes=world * FORWARD
            ),
            TrafficPlan(
                route="muon", phase="reduce", collectives=1, payload_bytes=REDUCE, total_payload_bytes=world * REDUCE
            ),
        ),
        ranks=tuple(
            RankPlan(rank=rank, cost=1.0 + rank, matrices=MATRICES if rank == 0 else 0, resident_bytes=1, peak_bytes=2)
            for rank in range(world)
        ),
        predicted_imbalance=1.3,
        ns_matrices=MATRICES,
        ns_flops=1e6,
        trainable_elements=20,
        frozen_elements=0,
        data=DataPlan(source="stdlib", files=1, tokens=1000, samples_per_epoch=10),
        tokens_per_step=32,
    )


def make_cost(chip: str) -> CostPlan:
    """A step of 110 ms where AdamW's takes 100."""
    return CostPlan(
        chip=chip, step_s=0.110, adamw_step_s=0.100, overhead_ratio=0.1, compute_s=0.090, update_s=0.015,
        adamw_update_s=0.006, ns_s=0.012, ns_mean_s=0.011, largest_matrix_s=0.001, exposed_s=0.005,
        adamw_exposed_s=0.004, publish_exposed_s=0.0, assumed=("node_hop_s",),
    )  # fmt: skip


def make_report(
    rank: int, step: int, *, matrices: int | None = None, loss: float = 2.0, skipped: int = 0
) -> RankReport:
    """A report of a rank that does what :func:`make_plan` says; ``matrices`` overrides the count of rank 0."""
    counted = MATRICES * (step - skipped) if matrices is None else matrices
    buckets = [0] * (len(STEP_SECONDS_BUCKETS) + 1)
    buckets[3] = step
    return RankReport(
        rank=rank,
        step=step,
        at=1_000_000.0 + step,
        loss=loss,
        grad_norm=1.5,
        skipped=False,
        skipped_total=skipped,
        tokens_total=16 * step,
        step_seconds=0.04,
        step_seconds_sum=0.04 * step,
        step_seconds_buckets=tuple(buckets),
        comm=(
            CommTotals(route="muon", phase="forward", collectives=step, seconds=0.02 * step,
                       exposed_seconds=0.005 * step, payload_bytes=FORWARD * step),
            CommTotals(route="muon", phase="reduce", collectives=step, seconds=0.01 * step,
                       exposed_seconds=0.0, payload_bytes=REDUCE * step),
        ),
        ns=(
            NsTotals(kernel=Kernel.CUBLAS, algorithm=Algorithm.GRAM, launches=10 * counted, matrices=counted,
                     seconds=0.001 * step),
        ) if rank == 0 else (),
        owner_compute_seconds=0.01 * step * (rank + 1),
        ns_orthogonality_error=0.1 if rank == 0 else None,
        routes=(RouteStats(route="muon", update_square_sum=4.0 * (rank + 1), elements=4),),
        kernel=Kernel.CUBLAS,
        kernel_epoch=0,
        compared_launches={Kernel.BLOCKED: 20},
        memory_bytes=1 << 20,
        lr={"muon": 0.02, "adamw": 0.001},
    )  # fmt: skip


def make_baseline_plan(spec: JobSpec) -> PlanReport:
    """The same parameters as a baseline's."""
    plan = make_plan(spec, "plan-baseline")
    absent: dict[str, object] = dict.fromkeys(("predicted_imbalance", "ns_matrices", "ns_flops"))
    own = tuple(entry.model_copy(update={"owner": None, "unit": ""}) for entry in plan.parameters)
    changes = absent | {"optimizer": spec.optimizer.kind, "parameters": own, "traffic": (), "ranks": ()}
    return plan.model_copy(update=changes)


def make_baseline_report(rank: int, step: int) -> RankReport:
    """A report of a rank that nothing counts for."""
    absent: dict[str, object] = dict.fromkeys(
        ("owner_compute_seconds", "kernel", "kernel_epoch", "ns_orthogonality_error")
    )
    return make_report(rank, step).model_copy(update=absent | {"comm": (), "ns": (), "compared_launches": {}})


class FakePlanner:
    """Plans at once; ``refuse`` holds the errors with which it refuses."""

    def __init__(self) -> None:
        self.refuse: tuple[FieldError, ...] = ()
        self.chips: list[str | None] = []
        self.before: Callable[[], None] = lambda: None
        self.closed = False

    def plan(self, spec: JobSpec, *, chip: str | None = None) -> PlanReport:
        self.before()
        self.chips.append(chip)
        if self.refuse:
            raise PlanRefusedProblem("no plan can be made", self.refuse)
        if spec.optimizer.kind != "dmuon":
            return make_baseline_plan(spec)
        return make_plan(spec).model_copy(update={} if chip is None else {"cost": make_cost(chip)})

    def kernels(self) -> tuple[KernelAvailability, ...]:
        return (KernelAvailability(kernel=Kernel.CUBLAS, available=True, detail="torch"),)

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeAttempt:
    """What a supervisor would hold."""

    start: AttemptStart
    entries: list[Entry] = field(default_factory=list)
    policies: list[KernelPolicy] = field(default_factory=list)
    stops: list[StopRequest] = field(default_factory=list)
    dropped: int = 0
    dead: bool = False
    silent: bool = False
    """It lives and does not answer."""
    left: bool = False

    def push(self, *bodies: RankReport | Milestone | RankError | AttemptEnd) -> None:
        for body in bodies:
            self.entries.append(Entry(seq=len(self.entries) + 1, body=body))

    def milestone(self, name: str) -> None:
        self.push(Milestone.model_validate({"name": name, "at": 1.0, "message": name}))

    def steps(self, *steps: int, ranks: int = 2) -> None:
        self.push(*(make_report(rank, step) for step in steps for rank in range(ranks)))

    def fail(self, rank: int, error: Exception) -> None:
        self.push(RankError(at=2.0, error=ErrorValue.from_exception(error, rank=rank)))

    def end(self, reason: Reason, message: str = "") -> None:
        self.push(AttemptEnd(at=3.0, reason=reason, message=message))


class FakeLauncher:
    """A cluster in memory. ``unreachable`` and ``delay_s`` make it ill."""

    def __init__(self, cpus: float = 4.0) -> None:
        self.total = Resources(cpus=cpus)
        self.free: Resources | None = None
        self.attempts: dict[tuple[str, int], FakeAttempt] = {}
        self.looks: tuple[GpuLook, ...] = ()
        self.leftovers: tuple[str, ...] = ()
        self.start_error: Exception | None = None
        self.unreachable = False
        self.delay_s = 0.0
        self.lock = threading.Lock()
        self.closed = False

    def _enter(self) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.unreachable:
            raise LauncherUnavailable("the cluster cannot be reached")

    def _find(self, ref: AttemptRef) -> FakeAttempt:
        self._enter()
        found = self.attempts.get((ref.job_id, ref.attempt))
        if found is None or found.dead or found.left:
            raise SupervisorGone("no such actor")
        if found.silent:
            raise LauncherUnavailable("the supervisor did not answer in time")
        assert found.start.fence == ref.fence
        return found

    def capacity(self) -> Capacity:
        self._enter()
        return Capacity((self.total,), self.total if self.free is None else self.free)

    def gpu_looks(self) -> tuple[GpuLook, ...]:
        self._enter()
        return self.looks

    def start_attempt(self, start: AttemptStart) -> None:
        self._enter()
        if self.start_error is not None:
            raise self.start_error
        self.attempts.setdefault((start.job_id, start.attempt), FakeAttempt(start))

    def poll(self, ref: AttemptRef, cursor: int, limit: int) -> PollBatch:
        found = self._find(ref)
        entries = tuple(entry for entry in found.entries if entry.seq > cursor)[:limit]
        return PollBatch(entries=entries, dropped=found.dropped, alive_ranks=2, ended=False)

    def set_kernels(self, ref: AttemptRef, policy: KernelPolicy) -> None:
        self._find(ref).policies.append(policy)

    def stop(self, ref: AttemptRef, request: StopRequest) -> None:
        self._find(ref).stops.append(request)

    def leave(self, ref: AttemptRef) -> None:
        self._find(ref).left = True

    def kill(self, ref: AttemptRef) -> None:
        self._enter()
        self.attempts[ref.job_id, ref.attempt].dead = True

    def remains(self, ref: AttemptRef) -> tuple[str, ...]:
        self._enter()
        return self.leftovers

    def close(self) -> None:
        self.closed = True
