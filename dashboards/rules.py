"""Recording and alert rules: what is divided once for all, and what somebody has to be told.

A recorded name is ``level:metric:operations``. An alert is a symptom, lasts for a while before it fires, and its
runbook is the section of ``docs/operate.md`` with its name. Every ratio is divided after both of its sides are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ALERTS", "RECORDINGS", "Alert", "Recording"]

Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A series that Prometheus computes. ``filled_by`` names the event without which it is empty."""

    record: str
    expr: str
    filled_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that somebody has to be told. ``lasting`` is how long it must hold, ``fires_when`` the event behind."""

    name: str
    expr: str
    lasting: str
    severity: Severity
    summary: str
    description: str
    fires_when: str


_W = "[5m]"
_STEPS = f"sum by (job) (rate(dmuon_steps_total{_W}))"
_MEAN_STEP_S = "(dmuon_step_duration_seconds_sum / (dmuon_step_duration_seconds_count > 0))"
_RUNNING = 'on (job) (dmuon_job_state{state="RUNNING"} == 1)'


def _of(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({name}{_W}))"


RECORDINGS: tuple[Recording, ...] = (
    Recording(
        record="job_route:dmuon_comm_overlap:ratio_rate5m",
        expr=f"1 - {_of('dmuon_comm_exposed_seconds_total', 'job, route')}"
        f" / ({_of('dmuon_comm_seconds_total', 'job, route')} > 0)",
    ),
    Recording(
        record="job_route_phase:dmuon_comm_overlap:ratio_rate5m",
        expr=f"1 - {_of('dmuon_comm_exposed_seconds_total', 'job, route, phase')}"
        f" / ({_of('dmuon_comm_seconds_total', 'job, route, phase')} > 0)",
    ),
    Recording(
        record="job:dmuon_comm_exposed:share_of_step_rate5m",
        expr=f"{_of('dmuon_comm_exposed_seconds_total', 'job')} / on (job) ("
        f"count by (job) (dmuon_heartbeat_timestamp_seconds) * on (job) "
        f"({_of('dmuon_step_duration_seconds_sum', 'job')} > 0))",
    ),
    Recording(
        record="job_route_phase:dmuon_comm_bytes:ratio_to_plan_rate5m",
        expr=f"{_of('dmuon_comm_bytes_total', 'job, route, phase')} / on (job, route, phase) "
        f"((dmuon_comm_planned_bytes_per_step > 0) * on (job) group_left () ({_STEPS} > 0))",
    ),
    Recording(
        record="job:dmuon_owner_compute:max_to_mean_rate5m",
        expr=f"max by (job) (rate(dmuon_owner_compute_seconds_total{_W}))"
        f" / (avg by (job) (rate(dmuon_owner_compute_seconds_total{_W})) > 0)",
    ),
    Recording(
        record="job:dmuon_owner_planned_cost:max_to_mean",
        expr="max by (job) (dmuon_owner_planned_cost) / (avg by (job) (dmuon_owner_planned_cost) > 0)",
    ),
    Recording(
        record="job:dmuon_ns_matrices:ratio_to_plan_rate5m",
        expr=f"{_of('dmuon_ns_matrices_total', 'job')} / on (job) ((dmuon_ns_planned_matrices > 0) * on (job) "
        f"(({_STEPS} - {_of('dmuon_skipped_steps_total', 'job')}) > 0))",
    ),
    Recording(record="job:dmuon_tokens:rate5m", expr=_of("dmuon_tokens_total", "job")),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="DMuonExporterDown",
        expr='up{job="dmuon"} == 0 or absent(up{job="dmuon"})',
        lasting="2m",
        severity="page",
        summary="The control plane does not answer Prometheus",
        description="Nothing is known of any job while this lasts. The jobs themselves run on without it.",
        fires_when="the control plane is down or Prometheus cannot reach it",
    ),
    Alert(
        name="DMuonControlPlaneBlind",
        expr='sum by (job) (dmuon_job_condition{type="Reachable", status!="True"}) > 0',
        lasting="2m",
        severity="ticket",
        summary="The control plane cannot reach the supervisor of job {{ $labels.job }}",
        description="This says nothing about the job, which may be training. It is not restarted for it.",
        fires_when="Ray cannot be reached",
    ),
    Alert(
        name="DMuonReconcilerStuck",
        expr="time() - dmuon_reconcile_timestamp_seconds > 60",
        lasting="1m",
        severity="page",
        summary="The loop that drives jobs has not finished a pass for a minute",
        description="Jobs run on, but none starts, ends or is restarted while this lasts.",
        fires_when="a call of the reconciler hangs, or another control plane holds the lease",
    ),
    Alert(
        name="DMuonRoutesNotVerified",
        expr='sum by (job) (dmuon_job_condition{type="RoutesVerified", status="False"}) > 0',
        lasting="0m",
        severity="page",
        summary="What job {{ $labels.job }} ran is not what was planned",
        description="The condition RoutesVerified names the routes, phases, counts, parameters or kernels that differ.",
        fires_when="bytes, matrices or launched kernels that differ from what was planned and chosen",
    ),
    Alert(
        name="DMuonNSNotRunning",
        expr="job:dmuon_ns_matrices:ratio_to_plan_rate5m < 0.99",
        lasting="2m",
        severity="page",
        summary="Newton-Schulz does not see all matrices of job {{ $labels.job }}",
        description="{{ $value | humanizePercentage }} of the planned matrices were orthogonalised: some parameter is "
        "not trained by Muon.",
        fires_when="fewer matrices are orthogonalised than planned",
    ),
    Alert(
        name="DMuonJobStalled",
        expr="((time() - max by (job) (dmuon_heartbeat_timestamp_seconds)) > on (job) "
        f"(60 + 20 * {_MEAN_STEP_S})) and {_RUNNING}",
        lasting="1m",
        severity="page",
        summary="Job {{ $labels.job }} has done no step for {{ $value | humanizeDuration }}",
        description="No rank has reported for twenty mean steps and a minute, while the job is RUNNING.",
        fires_when="all ranks of a running job stop reporting",
    ),
    Alert(
        name="DMuonLossNotFinite",
        expr="(dmuon_loss != dmuon_loss) or (abs(dmuon_loss) == Inf)",
        lasting="0m",
        severity="page",
        summary="The loss of job {{ $labels.job }} is not a finite number",
        description="Every step from here on is wasted unless the job skips such steps; see its skipped steps.",
        fires_when="a loss is NaN or infinite",
    ),
    Alert(
        name="DMuonExposedCommHigh",
        expr="job:dmuon_comm_exposed:share_of_step_rate5m > 0.1 and job:dmuon_comm_exposed:share_of_step_rate5m"
        " > 1.5 * avg_over_time(job:dmuon_comm_exposed:share_of_step_rate5m[1h])",
        lasting="10m",
        severity="ticket",
        summary="Job {{ $labels.job }} waits for communication for {{ $value | humanizePercentage }} of its steps",
        description="That is half as much again as in its own last hour.",
        fires_when="a share of exposed communication that is high and has risen",
    ),
    Alert(
        name="DMuonOwnerImbalance",
        expr="job:dmuon_owner_compute:max_to_mean_rate5m > 1.5"
        " and job:dmuon_owner_compute:max_to_mean_rate5m > 1.2 * job:dmuon_owner_planned_cost:max_to_mean",
        lasting="15m",
        severity="ticket",
        summary="One owner of job {{ $labels.job }} does {{ $value | humanize }} times the mean",
        description="More than was planned: a rank is slow, or the cost model misprices a shape.",
        fires_when="a rank that is slower than planned",
    ),
    Alert(
        name="DMuonKernelFallbackActive",
        expr=f'(sum by (job, kernel) (dmuon_breaker_state{{state=~"open|half_open|forced_open"}}) > 0) and {_RUNNING}',
        lasting="5m",
        severity="ticket",
        summary="Job {{ $labels.job }} runs the fallback instead of {{ $labels.kernel }}",
        description="The breaker of the kernel is open: by an operator's word or by itself. The events say which.",
        fires_when="a breaker that is open",
    ),
    Alert(
        name="DMuonKernelMixedAcrossRanks",
        expr="max by (job) (dmuon_kernel_epoch) != min by (job) (dmuon_kernel_epoch)",
        lasting="2m",
        severity="page",
        summary="The ranks of job {{ $labels.job }} do not run under the same kernel policy",
        description="For two minutes: this is no report that is late. Ranks with other kernels drift apart.",
        fires_when="ranks that report different kernel epochs",
    ),
    Alert(
        name="DMuonCheckpointStale",
        expr="((time() - dmuon_checkpoint_timestamp_seconds) > on (job) "
        f"(120 + 3 * dmuon_checkpoint_every_steps * on (job) {_MEAN_STEP_S})) and {_RUNNING}",
        lasting="5m",
        severity="ticket",
        summary="The last checkpoint of job {{ $labels.job }} is {{ $value | humanizeDuration }} old",
        description="Three intervals and two minutes: saving fails or is very slow, and a crash would cost all of it.",
        fires_when="checkpoints that fail",
    ),
    Alert(
        name="DMuonQueueStuck",
        expr='dmuon_queue_depth > 0 and on () (sum(dmuon_jobs{state=~"STARTING|RUNNING|STOPPING"}) == 0)',
        lasting="5m",
        severity="ticket",
        summary="{{ $value }} jobs wait and nothing runs",
        description="The message of each waiting job says what it waits for.",
        fires_when="jobs that wait while nothing runs",
    ),
    Alert(
        name="DMuonJobsLost",
        # increase() reaches beyond its samples: of three it makes 3.004.
        expr='round(sum(increase(dmuon_restarts_total{reason=~"worker_lost|node_lost|stalled"}[1h]))) > 3',
        lasting="0m",
        severity="ticket",
        summary="{{ $value | humanize }} attempts were lost to the machines in an hour",
        description="More than three: look for a node that they have in common.",
        fires_when="workers or nodes that die",
    ),
    Alert(
        name="DMuonGpuLeak",
        # Absent where nobody could look: what is not known is no leak, and no all-clear either.
        expr="max by (node, gpu) (dmuon_gpu_stray_processes) > 0",
        lasting="5m",
        severity="ticket",
        summary="{{ $value }} processes hold GPU {{ $labels.gpu }} of {{ $labels.node }} and belong to no job",
        description="That GPU is promised to jobs: one that is placed there finds less memory and is slower. The "
        "process was left by an attempt that has ended, or is somebody else's; dmuonctl gpus says which.",
        fires_when="a process on a GPU that no live attempt has started",
    ),
    Alert(
        name="DMuonReportsDropped",
        expr="sum by (job) (increase(dmuon_reports_dropped_total[15m])) > 0",
        lasting="0m",
        severity="ticket",
        summary="Reports of job {{ $labels.job }} were dropped",
        description="Its supervisor's outbox was full: nobody fetched for long. Totals are whole, steps are missing.",
        fires_when="a control plane that is away for very long",
    ),
    Alert(
        name="DMuonSeriesDropped",
        expr="dmuon_metrics_series_dropped > 0",
        lasting="5m",
        severity="ticket",
        summary="{{ $value }} series of job {{ $labels.job }} are over its budget",
        description="Figures by rank are left out first. Raise DMUON_METRICS_SERIES_BUDGET, or use the live page.",
        fires_when="a job with more series than its budget",
    ),
)
