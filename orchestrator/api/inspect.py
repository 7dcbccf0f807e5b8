"""Routes that explain a job, and list what it has saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from sqlalchemy.orm import Session

from orchestrator import resources as r
from orchestrator.api.auth import Principal, require
from orchestrator.api.build import event_resource, job_resource
from orchestrator.api.service import ServiceOf, reply
from orchestrator.explain import Known, explain
from orchestrator.store.attempts import last_attempt, totals_of
from orchestrator.store.jobs import events_of_kinds, find_job, jobs_ahead
from orchestrator.store.kernels import breaker_rows, effective_states
from orchestrator.store.models import Event, Job
from worker.contract.kernels import BreakerState
from worker.contract.states import JobState

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["jobs"])
Reader = Annotated[Principal, Depends(require("jobs:read"))]
_ALARMS = ("alarm", "stalled", "kernel_failed", "checkpoint_failed", "logs_off", "checkpoints_off")
_SHOWN = 200
_STOPPED = (BreakerState.OPEN, BreakerState.FORCED_OPEN)


@router.get("/jobs/{job_id}:explain", response_model=r.Explanation)
def explanation(service: ServiceOf, _: Reader, job_id: str) -> Response:
    """Why a job waits, is slow, was restarted or has ended."""
    with service.database.read() as session:
        job = find_job(session, job_id)
        known = Known(
            job=job_resource(session, job),
            ahead=jobs_ahead(session, job) if job.state == JobState.QUEUED else None,
            alarms=tuple(map(event_resource, events_of_kinds(session, job_id, _ALARMS, _SHOWN))),
            imbalance=_imbalance(session, job),
            fallback_kernels=_stopped(session, job),
        )
    return reply(explain(known))


def _imbalance(session: Session, job: Job) -> float | None:
    attempt = last_attempt(session, job.id)
    if attempt is None:
        return None
    reports = totals_of(session, [attempt.id]).get(attempt.id, {}).values()
    seconds = [report.owner_compute_seconds for report in reports if report.owner_compute_seconds is not None]
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    return max(seconds) / mean if mean > 0 else None


def _stopped(session: Session, job: Job) -> tuple[str, ...]:
    states = effective_states(breaker_rows(session), job.id)
    return tuple(kernel for kernel, state in states.items() if state in _STOPPED)


@router.get("/jobs/{job_id}/checkpoints", response_model=r.CheckpointList)
def checkpoints(service: ServiceOf, _: Reader, job_id: str) -> Response:
    """What a job has saved, newest first."""
    with service.database.read() as session:
        find_job(session, job_id)
        rows = events_of_kinds(session, job_id, ("checkpoint_saved",), _SHOWN)
    return reply(r.CheckpointList(checkpoints=tuple(_checkpoint(row) for row in reversed(rows))))


def _checkpoint(row: Event) -> r.CheckpointEntry:
    data = json.loads(row.data)
    path = Path(str(data.get("path", "")))
    present = path.exists() if path.parent.is_dir() else None
    names = ("step", "attempt", "bytes", "seconds")
    return r.CheckpointEntry(at=row.at, path=str(path), present=present, **{name: data.get(name) for name in names})
