"""The catalogue of metrics: the only place where a name, kind, unit, label or help text is written.

Exporter, dashboards, alert rules and documentation are held to it by tests. Seconds and bytes; counters end in
``_total``; a ratio is divided by the reader from two exported parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOGUE", "Metric", "metric"]

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family. ``name`` is the name that Prometheus stores, ``_total`` included."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str


def _m(name: str, kind: Kind, unit: str, labels: str, text: str) -> Metric:
    return Metric(name=name, kind=kind, unit=unit, labels=tuple(labels.split()), help=text)


CATALOGUE: tuple[Metric, ...] = (
    # Communication, by route and phase, summed over the ranks of a job.
    _m("dmuon_comm_seconds_total", "counter", "seconds", "job route phase",
       "Time between start and end of collectives"),
    _m("dmuon_comm_exposed_seconds_total", "counter", "seconds", "job route phase",
       "Part of the communication time for which compute waited"),
    _m("dmuon_comm_bytes_total", "counter", "bytes", "job route phase", "Payload bytes of collectives"),
    _m("dmuon_comm_collectives_total", "counter", "1", "job route phase", "Collectives issued"),
    _m("dmuon_comm_planned_bytes_per_step", "gauge", "bytes", "job route phase",
       "Payload bytes of one step over all ranks, as the plan predicts them"),
    # Ownership.
    _m("dmuon_owner_compute_seconds_total", "counter", "seconds", "job rank",
       "Time a rank spent on updating the parameters it owns"),
    _m("dmuon_owner_planned_cost", "gauge", "1", "job rank", "Planned cost of the parameters a rank owns"),
    # Newton-Schulz.
    _m("dmuon_ns_launches_total", "counter", "1", "job kernel algorithm",
       "Matrix products of Newton-Schulz that were launched, by what launched them"),
    _m("dmuon_ns_matrices_total", "counter", "1", "job kernel algorithm", "Matrices orthogonalised"),
    _m("dmuon_ns_seconds_total", "counter", "seconds", "job kernel algorithm", "Time in Newton-Schulz"),
    _m("dmuon_ns_planned_matrices", "gauge", "1", "job", "Matrices to orthogonalise in one step, over all ranks"),
    _m("dmuon_ns_orthogonality_error", "gauge", "ratio", "job",
       "Bound on the deviation from 1 of a squared singular value of a sampled update"),
    # Kernels.
    _m("dmuon_breaker_state", "gauge", "1", "job kernel state", "1 for the state that the breaker is in, else 0"),
    _m("dmuon_breaker_transitions_total", "counter", "1", "kernel from_state to_state", "Changes of a breaker"),
    _m("dmuon_kernel_swaps_total", "counter", "1", "result", "Swaps of a running job's kernel, by what came of them"),
    _m("dmuon_kernel_epoch", "gauge", "1", "job rank", "Changes of what a rank launches; the same on all ranks"),
    _m("dmuon_ns_compared_launches_total", "counter", "1", "job kernel",
       "Matrix products whose results were only compared with another kernel's"),
    _m("dmuon_ns_fallback_calls_total", "counter", "1", "job",
       "Newton-Schulz calls whose kernel failed and that the fallback did instead"),
    # Training.
    _m("dmuon_steps_total", "counter", "1", "job", "Optimizer steps done"),
    _m("dmuon_step_duration_seconds", "histogram", "seconds", "job", "Wall time of an optimizer step on rank 0"),
    _m("dmuon_tokens_total", "counter", "1", "job", "Tokens read by all ranks"),
    _m("dmuon_skipped_steps_total", "counter", "1", "job", "Steps skipped because of a non-finite gradient"),
    _m("dmuon_loss", "gauge", "nats", "job", "Training loss of the last step, a token"),
    _m("dmuon_gradient_norm", "gauge", "1", "job", "Global gradient norm of the last step, before clipping"),
    _m("dmuon_update_rms", "gauge", "1", "job route", "Root mean square of the last weight update, before decay"),
    _m("dmuon_learning_rate", "gauge", "1", "job route", "Learning rate of the last step"),
    _m("dmuon_parameters", "gauge", "1", "job route", "Parameters by route"),
    _m("dmuon_parameter_elements", "gauge", "1", "job route", "Elements of the parameters by route"),
    _m("dmuon_worker_memory_bytes", "gauge", "bytes", "job rank", "Memory of a worker"),
    _m("dmuon_heartbeat_timestamp_seconds", "gauge", "seconds", "job rank", "When a rank last reported"),
    # Jobs and queue.
    _m("dmuon_job_info", "gauge", "1", "job name project", "1 for a job that is alive or in its grace period"),
    _m("dmuon_job_state", "gauge", "1", "job state", "1 for the state that the job is in, else 0"),
    _m("dmuon_job_condition", "gauge", "1", "job type status",
       "1 for the status that a condition of the job has, else 0"),
    _m("dmuon_job_attempts_total", "counter", "1", "job", "Attempts that were started"),
    _m("dmuon_checkpoint_timestamp_seconds", "gauge", "seconds", "job", "When the last complete checkpoint was saved"),
    _m("dmuon_checkpoint_every_steps", "gauge", "1", "job", "Steps between two checkpoints, by the job's spec"),
    _m("dmuon_restarts_total", "counter", "1", "reason", "Attempts that followed another one, by why that one ended"),
    _m("dmuon_jobs", "gauge", "1", "state", "Jobs in each state"),
    _m("dmuon_jobs_finished_total", "counter", "1", "reason", "Jobs that ended, by reason"),
    _m("dmuon_queue_depth", "gauge", "1", "", "Jobs that wait"),
    _m("dmuon_queue_wait_seconds", "histogram", "seconds", "", "From submission to the start of the first attempt"),
    _m("dmuon_cluster_resources", "gauge", "1", "resource amount", "CPUs and GPUs of the cluster, in all and free"),
    _m("dmuon_gpu_stray_processes", "gauge", "1", "node gpu",
       "Processes on a GPU that belong to no live attempt; absent where a look did not see the GPU"),
    _m("dmuon_gpu_unresolved_processes", "gauge", "1", "node", "Processes on GPUs that cannot be told from their node"),
    _m("dmuon_gpu_node_seen", "gauge", "1", "node", "1 where the last look saw all GPUs of a node, else 0"),
    # The control plane itself.
    _m("dmuon_http_request_duration_seconds", "histogram", "seconds", "handler method code",
       "Time to answer a request, by URL template"),
    _m("dmuon_reconcile_duration_seconds", "histogram", "seconds", "", "One pass of the reconciler"),
    _m("dmuon_reconcile_timestamp_seconds", "gauge", "seconds", "", "When the reconciler last finished a pass"),
    _m("dmuon_open_streams", "gauge", "1", "", "Streams of events that are open"),
    _m("dmuon_metrics_series", "gauge", "1", "job", "Series that a job exports"),
    _m("dmuon_metrics_series_dropped", "gauge", "1", "job", "Series of a job that are over its budget and left out"),
    _m("dmuon_reports_dropped_total", "counter", "1", "job", "Reports that left a full outbox unread"),
)  # fmt: skip

_BY_NAME = {entry.name: entry for entry in CATALOGUE}
assert len(_BY_NAME) == len(CATALOGUE), "a metric stands twice in the catalogue"


def metric(name: str) -> Metric:
    """Return the catalogue's entry.

    Raises:
        KeyError: ``name`` is not in the catalogue.
    """
    return _BY_NAME[name]
