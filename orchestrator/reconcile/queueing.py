"""Which waiting jobs start. Pure: queue, cluster and quotas in; for every job a decision and its reason out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.launcher_api import Capacity, Resources
from orchestrator.quota import Quota, Usage
from worker.contract.errors import FieldError

__all__ = ["STARVATION_S", "Admission", "WaitReason", "Waiting", "decide_admissions"]

STARVATION_S = 300.0
"""A job that waited this long is passed by no other of its priority or below."""


class WaitReason(StrEnum):
    """Why a job is not started now."""

    CAPACITY = "waiting_for_capacity"
    QUOTA = "waiting_for_quota"
    ORDER = "waiting_for_others"
    """Another job waits for room that this one must not take from it."""
    NO_MACHINE = "waiting_for_machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job in the queue."""

    job_id: str
    worker: Resources
    """What one worker needs."""
    workers: int
    waited_s: float
    project: str = "default"
    priority: int = 0
    planned_bytes: float = 0.0
    """Memory that a worker needs at least, by its plan: parameters, gradients and optimizer state."""

    @property
    def total(self) -> Resources:
        """All workers together."""
        return self.worker.times(self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What becomes of a waiting job: it starts, can never start (``errors``), or waits for ``reason``."""

    job_id: str
    start: bool = False
    errors: tuple[FieldError, ...] = ()
    reason: WaitReason | None = None
    message: str = ""


def decide_admissions(
    waiting: Sequence[Waiting],
    capacity: Capacity,
    reserved: Resources,
    *,
    quotas: Mapping[str, Quota] | None = None,
    used: Mapping[str, Usage] | None = None,
    making_room: bool = False,
) -> list[Admission]:
    """Admit whole gangs by priority, then age; return a decision for each of ``waiting``, in its order.

    A smaller job may pass one that does not fit, until that one has starved, or while running jobs give way to it.

    Args:
        waiting: the queue, oldest first.
        capacity: what the cluster has.
        reserved: promised to jobs that have started and do not hold it yet.
        quotas: by project.
        used: by project, what its jobs hold or were promised.
        making_room: running jobs were asked to give way to the first that does not fit.
    """
    order = sorted(range(len(waiting)), key=lambda index: -waiting[index].priority)  # stable: age decides among equals
    decisions: dict[int, Admission] = {}
    free, blocked_by, usage = capacity.free - reserved, "", dict(used or {})
    feasible: dict[tuple[Resources, int, float], tuple[FieldError, ...]] = {}
    for index in order:
        job = waiting[index]
        key = (job.worker, job.workers, job.planned_bytes)
        if key not in feasible:
            feasible[key] = _impossible(job, capacity)
        quota, mine = (quotas or {}).get(job.project, Quota()), usage.get(job.project, Usage())
        errors = feasible[key] or _never_within(job, quota)
        short = "" if errors else _above(job, quota, mine)
        if errors:
            decisions[index] = Admission(job_id=job.job_id, errors=errors)
        elif short:
            decisions[index] = Admission(job_id=job.job_id, reason=WaitReason.QUOTA, message=short)
        elif blocked_by:
            text = f"waits behind job {blocked_by}, which has waited longer or has a higher priority"
            decisions[index] = Admission(job_id=job.job_id, reason=WaitReason.ORDER, message=text)
        elif free.holds(job.worker) >= job.workers:
            free, usage[job.project] = free - job.total, mine.plus(job.total)
            decisions[index] = Admission(job_id=job.job_id, start=True)
        else:
            decisions[index] = _no_room(job, capacity, free)
            blocked_by = job.job_id if making_room or job.waited_s > STARVATION_S else ""
    return [decisions[index] for index in range(len(waiting))]


def _no_room(job: Waiting, capacity: Capacity, free: Resources) -> Admission:
    if not capacity.nodes:
        text = "the cluster has no live machine; if it is not coming up, 'dmuonctl down' and 'up' start anew"
        return Admission(job_id=job.job_id, reason=WaitReason.NO_MACHINE, message=text)
    text = f"{job.workers} workers ask for {job.total} at once; {free} are free now"
    return Admission(job_id=job.job_id, reason=WaitReason.CAPACITY, message=text)


def _bounds(job: Waiting, quota: Quota, used: Usage) -> list[tuple[str, float, float, float]]:
    """Return (what, bound, used, asked) of each bound that there is."""
    asked, held = job.total, used.resources
    rows = (
        ("CPUs", quota.cpus, held.cpus, asked.cpus),
        ("GPUs", quota.gpus, held.gpus, asked.gpus),
        ("bytes of memory", quota.memory_bytes, held.memory_bytes, asked.memory_bytes),
        ("jobs", quota.jobs, used.jobs, 1),
    )
    return [(what, bound, have, ask) for what, bound, have, ask in rows if bound is not None]


def _above(job: Waiting, quota: Quota, used: Usage) -> str:
    found = [
        f"{bound:g} {what}, of which {have:g} are used and this job asks for {ask:g}"
        for what, bound, have, ask in _bounds(job, quota, used)
        if have + ask > bound + 1e-9
    ]
    return f"project {job.project} may use {'; '.join(found)}" if found else ""


def _never_within(job: Waiting, quota: Quota) -> tuple[FieldError, ...]:
    """Refuse a job that its project's quota would not hold if nothing else ran."""
    return tuple(
        FieldError(
            pointer="/project",
            code="infeasible",
            message=f"the job asks for {ask:g} {what}; project {job.project} may use {bound:g} at once",
            suggestion="Ask for less in /resources or /mesh, or have the quota raised.",
        )
        for what, bound, _, ask in _bounds(job, quota, Usage())
        if ask > bound + 1e-9
    )


def _impossible(job: Waiting, capacity: Capacity) -> tuple[FieldError, ...]:
    """Refuse what the machines could not hold if they were empty: by what was asked for, then by what is planned."""
    if not capacity.nodes:
        return ()  # a cluster without nodes is one that is coming up
    largest = max(capacity.nodes, key=lambda node: (node.holds(job.worker), node.cpus, node.gpus))
    if largest.holds(job.worker) < 1:
        message = f"a worker asks for {job.worker}; the largest machine has {largest}"
        return (_error("/resources", message, "Ask for less in /resources."),)
    places = int(sum(node.holds(job.worker) for node in capacity.nodes))
    if places < job.workers:
        total = sum(capacity.nodes, Resources())
        message = (
            f"{job.workers} workers ask for {job.total}; the cluster's {len(capacity.nodes)} "
            f"machine(s) have {total}, room for {places}"
        )
        cure = f"Use at most {places} workers in /mesh, or ask for less in /resources."
        return (_error("/mesh", message, cure),)
    return _too_large(job, capacity)


def _too_large(job: Waiting, capacity: Capacity) -> tuple[FieldError, ...]:
    """Refuse a model that cannot fit: the plan counts parameters, gradients and state, activations come on top."""
    known = [node for node in capacity.nodes if node.memory_bytes > 0]
    if job.worker.gpus or len(known) < len(capacity.nodes) or job.planned_bytes <= job.worker.memory_bytes:
        return ()  # it lives on a GPU, whose memory the cluster does not tell, or it reserves what it needs
    worker = replace(job.worker, memory_bytes=job.planned_bytes)
    places = int(sum(node.holds(worker) for node in known))
    if places >= job.workers:
        return ()
    largest = max(known, key=lambda node: node.memory_bytes)
    message = (
        f"each of {job.workers} workers needs at least {job.planned_bytes / 2**30:.2f} GiB for parameters, "
        f"gradients and optimizer state; the {len(known)} machine(s), the largest with "
        f"{largest.memory_bytes / 2**30:.2f} GiB, hold {places} such workers"
    )
    return (_error("/model", message, "Shard over more machines in /mesh, or train a smaller model."),)


def _error(pointer: str, message: str, cure: str) -> FieldError:
    return FieldError(pointer=pointer, code="infeasible", message=message, suggestion=cure)
