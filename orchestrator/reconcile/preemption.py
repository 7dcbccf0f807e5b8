"""Making room for a job of a higher priority: which running jobs give way, and asking them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import LauncherUnavailable, StaleWrite
from orchestrator.launcher_api import Resources
from orchestrator.reconcile.admission import CONDITION as ADMITTED
from orchestrator.reconcile.context import Context
from orchestrator.reconcile.decide import demand_of
from orchestrator.reconcile.queueing import WaitReason
from orchestrator.store.jobs import first_in_line, jobs_in
from orchestrator.store.models import Job
from orchestrator.store.stops import ALIVE, request_preemption
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["Claim", "decide_victims", "preempt_for_priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a job holds or asks for."""

    job_id: str
    number: int
    """Order of submission."""
    priority: int
    preemptible: bool
    worker: Resources
    workers: int

    @property
    def total(self) -> Resources:
        """All of its workers together."""
        return self.worker.times(self.workers)


def decide_victims(first: Claim, running: Sequence[Claim], free: Resources) -> list[Claim]:
    """Return the jobs that must give way so that ``first`` fits; empty when it fits already or never would.

    Only preemptible jobs of a lower priority give way: the lowest first, among equals the youngest. None gives way
    whose room would not be needed in the end.
    """
    if free.holds(first.worker) >= first.workers:
        return []
    lower = [job for job in running if job.preemptible and job.priority < first.priority]
    victims: list[Claim] = []
    for job in sorted(lower, key=lambda claim: (claim.priority, -claim.number)):
        victims.append(job)
        free += job.total
        if free.holds(first.worker) >= first.workers:
            break
    else:
        return []
    for job in reversed(victims[:-1]):
        if (free - job.total).holds(first.worker) >= first.workers:
            victims.remove(job)
            free -= job.total
    return victims


def preempt_for_priority(context: Context) -> int:
    """Ask for the room that the first job of the queue needs; return how many jobs were asked to give way.

    Nobody is asked while room that was asked for before is still being released.
    """
    with context.database.read() as session:
        alive = {job.id: job for job in jobs_in(session, *ALIVE)}
        leaving = [job for job in jobs_in(session, JobState.STOPPING) if job.reason == Reason.PREEMPTED]
        # Room is of no use to a job that its project's quota holds back.
        job = first_in_line(session, ADMITTED, WaitReason.QUOTA) if alive and not leaving else None
    if job is None:
        return 0
    first, running = _claim(job), [_claim(job) for job in alive.values()]
    if not any(claim.preemptible and claim.priority < first.priority for claim in running):
        return 0
    try:
        free = context.launcher.capacity().free
    except LauncherUnavailable:
        return 0  # admission says so for every job that waits
    victims = decide_victims(first, running, free)
    return sum(_ask(context, alive[victim.job_id], victim, first) for victim in victims)


def _claim(job: Job) -> Claim:
    spec = JobSpec.model_validate_json(job.spec)
    return Claim(
        job_id=job.id, number=job.number, priority=spec.priority, preemptible=spec.preemptible, worker=demand_of(spec),
        workers=spec.world_size,
    )  # fmt: skip


def _ask(context: Context, job: Job, victim: Claim, first: Claim) -> bool:
    by = f"job {first.job_id} of priority {first.priority} (this one has {victim.priority})"
    try:
        with context.database.write() as session:
            request_preemption(session, job.id, by, guard=context.guard(job), now=context.clock())
    except StaleWrite:
        return False  # it moved on: the next pass looks again
    context.changed()
    return True
