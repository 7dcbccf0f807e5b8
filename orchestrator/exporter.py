"""Prometheus series, rendered from the store when they are asked for.

So they survive a restart, a job's series vanish a grace period after its end, and no process has to be remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session

from orchestrator._budget import JobSeries
from orchestrator._families import Families
from orchestrator.clock import Clock
from orchestrator.gpus import GpuSight, Standing
from orchestrator.launcher_api import Capacity, Resources
from orchestrator.store.attempts import attempts_of, count_restarts, totals_of
from orchestrator.store.database import Database
from orchestrator.store.jobs import (
    conditions_of,
    count_by_reason,
    count_by_state,
    jobs_shown,
    last_event_at,
    plan_of,
    queue_waits,
)
from orchestrator.store.kernels import breaker_rows, effective_states, transition_counts
from orchestrator.store.models import Attempt, Breaker, Job
from orchestrator.store.swaps import runtime_counts, runtime_rows, runtime_states, swap_counts
from orchestrator.timings import Histogram
from orchestrator.totals import comm_sums, ns_sums, update_rms
from worker.contract.kernels import BreakerState
from worker.contract.messages import STEP_SECONDS_BUCKETS, RankReport
from worker.contract.plan import PlanReport
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["QUEUE_WAIT_BOUNDS_S", "ProcessFigures", "StoreCollector", "registry_of"]

QUEUE_WAIT_BOUNDS_S = (0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)
_OWN_SERIES = 2
"""Of a job's budget: those that say how many series it has."""
Totals = Mapping[int, Mapping[int, RankReport]]
"""Last reports by attempt id and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """What this process knows of itself and the store does not."""

    http_seconds: Histogram
    pass_seconds: Histogram
    last_pass_at: float | None = None
    """Wall clock; None before the first pass."""
    open_streams: int = 0
    capacity: Capacity | None = None
    """What the cluster was last seen to have; None when it could not be asked."""
    gpus: GpuSight | None = None
    """Who was last seen to hold its GPUs; None when it could not be asked."""


def registry_of(
    database: Database, clock: Clock, *, grace_s: float, series_budget: int, figures: ProcessFigures
) -> CollectorRegistry:
    """Return a registry of its own, which holds the catalogue's families and nothing else.

    Args:
        database: the store.
        clock: wall clock, seconds since the epoch.
        grace_s: how long the series of a finished job stay.
        series_budget: how many series a job may export.
        figures: what this process measured of itself.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreCollector(database, clock, grace_s, series_budget, figures))
    return registry


class StoreCollector(Collector):
    """All families of the catalogue, from one consistent look at the store."""

    def __init__(
        self, database: Database, clock: Clock, grace_s: float, series_budget: int, figures: ProcessFigures
    ) -> None:
        self._database, self._clock, self._grace_s = database, clock, grace_s
        self._series_budget, self._figures = series_budget, figures

    def collect(self) -> Iterator[Family]:
        """Yield the families."""
        families = Families()
        _add_process(families, self._figures)
        with self._database.read() as session:
            _add_service(families, session)
            breakers = breaker_rows(session)
            for job in jobs_shown(session, self._clock() - self._grace_s):
                series = JobSeries(families)
                _add_job_series(series, session, job, breakers)
                kept, dropped = series.flush(self._series_budget - _OWN_SERIES)
                families.add("dmuon_metrics_series", (job.id,), kept + _OWN_SERIES)
                families.add("dmuon_metrics_series_dropped", (job.id,), dropped)
        yield from families.all()


def _add_job_series(series: JobSeries, session: Session, job: Job, breakers: Sequence[Breaker]) -> None:
    attempts = attempts_of(session, job.id)
    totals = totals_of(session, [row.id for row in attempts])
    _add_job(series, job, attempts)
    _add_breakers(series, session, job, attempts, breakers)
    _add_conditions(series, session, job)
    _add_plan(series, job.id, plan_of(session, job))
    _add_totals(series, job.id, totals)
    _add_last(series, job.id, totals)


def _add_process(families: Families, figures: ProcessFigures) -> None:
    families.add_histogram("dmuon_http_request_duration_seconds", figures.http_seconds)
    families.add_histogram("dmuon_reconcile_duration_seconds", figures.pass_seconds)
    families.add("dmuon_open_streams", (), figures.open_streams)
    if figures.last_pass_at is not None:
        families.add("dmuon_reconcile_timestamp_seconds", (), figures.last_pass_at)
    if figures.capacity is not None:
        total = sum(figures.capacity.nodes, Resources())
        for amount, found in (("total", total), ("free", figures.capacity.free)):
            families.add("dmuon_cluster_resources", ("cpus", amount), found.cpus)
            families.add("dmuon_cluster_resources", ("gpus", amount), found.gpus)
    if figures.gpus is not None:
        _add_gpus(families, figures.gpus)


def _add_gpus(families: Families, sight: GpuSight) -> None:
    for look in sight.looks:
        families.add("dmuon_gpu_node_seen", (look.node,), not look.problem)
        for gpu, number in sight.count(look, Standing.STRAY).items():
            families.add("dmuon_gpu_stray_processes", (look.node, str(gpu)), number)
        if look.gpus:
            unknown = sum(sight.count(look, Standing.UNKNOWN).values())
            families.add("dmuon_gpu_unresolved_processes", (look.node,), unknown)


def _add_service(families: Families, session: Session) -> None:
    states, reasons = count_by_state(session), count_by_reason(session)
    for state in JobState:
        families.add("dmuon_jobs", (state,), states.get(state, 0))
    for reason in Reason:
        families.add("dmuon_jobs_finished_total", (reason,), reasons.get(reason, 0))
    waiting = (JobState.SUBMITTED, JobState.QUEUED, JobState.RESTARTING)
    families.add("dmuon_queue_depth", (), sum(states.get(state, 0) for state in waiting))
    below, number, total = queue_waits(session, QUEUE_WAIT_BOUNDS_S)
    families.add_buckets("dmuon_queue_wait_seconds", (), QUEUE_WAIT_BOUNDS_S, [*below, number], total)
    by_operators, by_themselves = transition_counts(session), runtime_counts(session)
    for labels in sorted({*by_operators, *by_themselves}):
        number = by_operators.get(labels, 0) + by_themselves.get(labels, 0)
        families.add("dmuon_breaker_transitions_total", labels, number)
    for result, number in swap_counts(session).items():
        families.add("dmuon_kernel_swaps_total", (result,), number)
    restarts = count_restarts(session)
    for reason in Reason:
        families.add("dmuon_restarts_total", (reason,), restarts.get(reason, 0))


def _add_job(families: JobSeries, job: Job, attempts: Sequence[Attempt]) -> None:
    families.add("dmuon_job_info", (job.id, job.name, job.project), 1)
    for state in JobState:
        families.add("dmuon_job_state", (job.id, state), job.state == state)
    families.add("dmuon_job_attempts_total", (job.id,), len(attempts))
    families.add("dmuon_reports_dropped_total", (job.id,), sum(row.dropped for row in attempts))


def _add_breakers(
    families: JobSeries, session: Session, job: Job, attempts: Sequence[Attempt], breakers: Sequence[Breaker]
) -> None:
    """The operator's word where there is one, else the worst state that a breaker of the last attempt came to."""
    moved = runtime_states(runtime_rows(session, job.id, attempts[-1].number)) if attempts else {}
    for kernel, said in effective_states(breakers, job.id).items():
        now = moved.get(kernel, said) if said is BreakerState.CLOSED else said
        for breaker_state in BreakerState:
            families.add("dmuon_breaker_state", (job.id, kernel, breaker_state), now is breaker_state)


def _add_conditions(families: JobSeries, session: Session, job: Job) -> None:
    for row in conditions_of(session, job.id):
        for status in ("True", "False", "Unknown"):
            families.add("dmuon_job_condition", (job.id, row.type, status), row.status == status)
    saved_at = last_event_at(session, job.id, "checkpoint_saved")
    if saved_at is not None:
        families.add("dmuon_checkpoint_timestamp_seconds", (job.id,), saved_at)
    every = JobSpec.model_validate_json(job.spec).checkpoint.every_steps
    if every is not None:
        families.add("dmuon_checkpoint_every_steps", (job.id,), every)


def _add_plan(families: JobSeries, job: str, plan: PlanReport | None) -> None:
    if plan is None:
        return
    if plan.ns_matrices is not None:
        families.add("dmuon_ns_planned_matrices", (job,), plan.ns_matrices)
    planned: dict[tuple[str, str], int] = {}
    for part in plan.traffic:
        key = (part.route, part.phase)
        planned[key] = planned.get(key, 0) + part.total_payload_bytes
    for (route, phase), number in planned.items():
        families.add("dmuon_comm_planned_bytes_per_step", (job, route, phase), number)
    for rank in plan.ranks:
        families.add("dmuon_owner_planned_cost", (job, str(rank.rank)), rank.cost)
    for entry in plan.routes:
        families.add("dmuon_parameters", (job, entry.route), entry.parameters)
        families.add("dmuon_parameter_elements", (job, entry.route), entry.elements)


def _add_totals(families: JobSeries, job: str, totals: Totals) -> None:
    """Counters: summed over ranks and attempts, so that another attempt never takes them back."""
    reports = [report for ranks in totals.values() for report in ranks.values()]
    if not reports:
        return
    for (route, phase), comm in comm_sums(reports).items():
        families.add("dmuon_comm_seconds_total", (job, route, phase), comm.seconds)
        families.add("dmuon_comm_exposed_seconds_total", (job, route, phase), comm.exposed_seconds)
        families.add("dmuon_comm_bytes_total", (job, route, phase), comm.payload_bytes)
        families.add("dmuon_comm_collectives_total", (job, route, phase), comm.collectives)
    for (kernel, algorithm), ns in ns_sums(reports).items():
        families.add("dmuon_ns_launches_total", (job, kernel, algorithm), ns.launches)
        families.add("dmuon_ns_matrices_total", (job, kernel, algorithm), ns.matrices)
        families.add("dmuon_ns_seconds_total", (job, kernel, algorithm), ns.seconds)
    for rank in sorted({report.rank for report in reports}):
        seconds = [report.owner_compute_seconds for report in reports if report.rank == rank]
        measured = [each for each in seconds if each is not None]
        if measured:
            families.add("dmuon_owner_compute_seconds_total", (job, str(rank)), sum(measured))
    for kernel in sorted({kernel for report in reports for kernel in report.compared_launches}):
        number = sum(report.compared_launches.get(kernel, 0) for report in reports)
        families.add("dmuon_ns_compared_launches_total", (job, kernel), number)
    if any(report.kernel is not None for report in reports):
        families.add("dmuon_ns_fallback_calls_total", (job,), sum(report.fallback_calls for report in reports))
    families.add("dmuon_tokens_total", (job,), sum(report.tokens_total for report in reports))
    families.add("dmuon_steps_total", (job,), _sum_of_largest(totals, "steps_done"))
    families.add("dmuon_skipped_steps_total", (job,), _sum_of_largest(totals, "skipped_total"))
    _add_step_histogram(families, job, [ranks[0] for ranks in totals.values() if 0 in ranks])


def _sum_of_largest(totals: Totals, field: str) -> int:
    return sum(max(int(getattr(report, field)) for report in ranks.values()) for ranks in totals.values())


def _add_step_histogram(families: JobSeries, job: str, leads: Sequence[RankReport]) -> None:
    if not leads:
        return
    counts = [sum(column) for column in zip(*(lead.step_seconds_buckets for lead in leads), strict=True)]
    cumulative = [sum(counts[: index + 1]) for index in range(len(counts))]
    total = sum(lead.step_seconds_sum for lead in leads)
    families.add_buckets("dmuon_step_duration_seconds", (job,), STEP_SECONDS_BUCKETS, cumulative, total)


def _add_last(families: JobSeries, job: str, totals: Totals) -> None:
    """Gauges: by the last attempt that has reported."""
    if not totals:
        return
    last = totals[max(totals)]
    lead = last[min(last)]
    families.add("dmuon_loss", (job,), lead.loss)
    if lead.grad_norm is not None:
        families.add("dmuon_gradient_norm", (job,), lead.grad_norm)
    for route, rate in lead.lr.items():
        families.add("dmuon_learning_rate", (job, route), rate)
    for route, rms in update_rms(last.values()).items():
        families.add("dmuon_update_rms", (job, route), rms)
    worst = _largest(report.ns_orthogonality_error for report in last.values())
    if worst is not None:
        families.add("dmuon_ns_orthogonality_error", (job,), worst)
    for rank, report in sorted(last.items()):
        if report.kernel_epoch is not None:
            families.add("dmuon_kernel_epoch", (job, str(rank)), report.kernel_epoch)
        families.add("dmuon_worker_memory_bytes", (job, str(rank)), report.memory_bytes)
        families.add("dmuon_heartbeat_timestamp_seconds", (job, str(rank)), report.at)


def _largest(values: Iterable[float | None]) -> float | None:
    """Return the largest value; NaN counts as larger than all, since it must not be hidden."""
    found = [value for value in values if value is not None]
    return max(found, key=lambda value: (value != value, value), default=None)
