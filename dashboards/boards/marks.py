"""What is marked on the time axis of a job's boards."""

from __future__ import annotations

from dashboards.panels import Annotation

__all__ = ["JOB_MARKS"]

ATTEMPTS = Annotation(
    name="Attempts",
    expr='changes(dmuon_job_attempts_total{job="$job"}[$__interval]) > 0',
    color="blue",
    filled_by="an attempt that follows another one",
)
KERNEL_CHANGES = Annotation(
    name="Kernel changes",
    expr='changes(dmuon_kernel_epoch{job="$job", rank="0"}[$__interval]) > 0',
    color="orange",
    filled_by="a swap, a trip or an operator's word on a kernel",
)
ALERTS = Annotation(
    name="Alerts",
    expr='ALERTS{alertstate="firing", job="$job"}',
    color="red",
    filled_by="an alert of this job that fires",
)
JOB_MARKS = (ATTEMPTS, KERNEL_CHANGES, ALERTS)
