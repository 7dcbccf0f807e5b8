"""Rows to documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from sqlalchemy.orm import Session

from orchestrator import resources as r
from orchestrator.logs import Part
from orchestrator.store.attempts import attempts_of, errors_of, totals_of
from orchestrator.store.jobs import conditions_of, plan_of
from orchestrator.store.models import Attempt, Condition, Event, Job
from orchestrator.totals import CommSum, comm_sums, ns_sums, overlap_of
from worker.contract.errors import ErrorValue, FieldError
from worker.contract.messages import RankReport
from worker.contract.plan import PlanReport
from worker.contract.spec import JobSpec
from worker.contract.states import Reason

__all__ = [
    "comm_figures", "condition_resource", "event_resource", "job_resource", "job_summary", "log_page", "ns_figures",
    "plan_summary", "step_point",
]  # fmt: skip


def _summary_fields(job: Job, spec: JobSpec) -> dict[str, object]:
    blame = str(Reason(job.reason).blame) if job.reason is not None and job.reason in set(Reason) else None
    return {
        "id": job.id,
        "name": job.name,
        "project": job.project,
        "labels": spec.labels,
        "state": job.state,
        "reason": job.reason,
        "blame": blame,
        "message": job.message,
        "created_at": job.created_at,
        "state_since": job.state_since,
        "finished_at": job.finished_at,
        "version": job.version,
    }


def job_summary(job: Job) -> r.JobSummary:
    """Return a job as it stands in a list."""
    return r.JobSummary.model_validate(_summary_fields(job, JobSpec.model_validate_json(job.spec)))


def job_resource(session: Session, job: Job) -> r.JobResource:
    """Return a whole job."""
    spec = JobSpec.model_validate_json(job.spec)
    attempts, plan = attempts_of(session, job.id) if job.version > 1 else [], plan_of(session, job)
    totals = totals_of(session, [row.id for row in attempts])
    fields = _summary_fields(job, spec) | {
        "errors": tuple(FieldError.model_validate(entry) for entry in json.loads(job.field_errors)),
        "rank_errors": _error_groups(attempts, errors_of(session, [row.id for row in attempts])),
        "attempts": tuple(map(_attempt_resource, attempts)),
        "conditions": tuple(map(condition_resource, conditions_of(session, job.id))),
        "spec": spec,
        "plan": None if plan is None else plan_summary(plan),
        "progress": _progress(spec, totals.get(attempts[-1].id, {}) if attempts else {}),
    }
    return r.JobResource.model_validate(fields)


def _attempt_resource(row: Attempt) -> r.AttemptResource:
    return r.AttemptResource(
        number=row.number,
        created_at=row.created_at,
        launched_at=row.launched_at,
        formed_at=row.formed_at,
        ended_at=row.ended_at,
        end_reason=row.end_reason,
        end_message=row.end_message,
        alive_ranks=row.alive_ranks,
        dropped_reports=row.dropped,
    )


def _error_groups(attempts: Iterable[Attempt], found: Iterable[tuple[int, ErrorValue]]) -> tuple[r.ErrorGroup, ...]:
    numbers = {row.id: row.number for row in attempts}
    groups: dict[tuple[int, str, str], list[ErrorValue]] = {}
    for attempt_id, error in found:
        groups.setdefault((numbers[attempt_id], error.type, error.message), []).append(error)
    return tuple(
        r.ErrorGroup(
            attempt=attempt,
            type=kind,
            message=message,
            ranks=tuple(error.rank for error in errors),
            fields=errors[0].fields,
            traceback=errors[0].traceback,
        )
        for (attempt, kind, message), errors in groups.items()
    )


def condition_resource(row: Condition) -> r.ConditionResource:
    """Return a condition."""
    return r.ConditionResource(
        type=row.type,
        status=row.status,
        reason=row.reason,
        message=row.message,
        since=row.since,
        data=json.loads(row.data),
    )


def event_resource(row: Event) -> r.EventResource:
    """Return an event."""
    return r.EventResource(seq=row.seq, at=row.at, kind=row.kind, message=row.message, data=json.loads(row.data))


def log_page(part: Part) -> r.LogPage:
    """Return lines of logs."""
    attempt = part.cursor.attempt
    lines = tuple(
        r.LogLine(
            attempt=attempt, rank=rank, stream=stream, offset=line.offset, next_offset=line.next_offset,
            text=line.text, partial=line.partial,
        )
        for (rank, stream), line in part.lines
    )  # fmt: skip
    dropped = tuple(
        r.LogDropped(rank=rank, stream=stream, dropped_bytes=number) for (rank, stream), number in part.dropped.items()
    )
    return r.LogPage(lines=lines, next_after=str(part.cursor), dropped=dropped, drained=part.drained)


def plan_summary(plan: PlanReport) -> r.PlanSummary:
    """Return the figures of a plan."""
    return r.PlanSummary.model_validate(plan.model_dump(include=set(r.PlanSummary.model_fields)))


def _progress(spec: JobSpec, totals: Mapping[int, RankReport]) -> r.Progress:
    steps = spec.training.steps
    if not totals:
        return r.Progress(steps=steps)
    lead = totals[min(totals)]
    tokens = sum(report.tokens_total for report in totals.values())
    seconds = lead.step_seconds_sum
    return r.Progress(
        step=min(report.step for report in totals.values()),
        first_step=lead.first_step,
        steps=steps,
        skipped_steps=lead.skipped_total,
        loss=lead.loss,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        overlap_ratio=overlap_of(comm_sums(totals.values()).values()),
    )


def comm_figures(
    sums: Mapping[tuple[str, str], CommSum], planned: Mapping[tuple[str, str], int] | None = None
) -> tuple[r.CommFigures, ...]:
    """Return communication by route and phase; ``planned`` adds the bytes that the plan foresees."""
    keys = sorted(sums.keys() | (planned or {}).keys())
    figures = []
    for key in keys:
        total = sums.get(key, CommSum())
        figures.append(
            r.CommFigures(
                route=key[0],
                phase=key[1],
                collectives=total.collectives,
                seconds=total.seconds,
                exposed_seconds=total.exposed_seconds,
                payload_bytes=total.payload_bytes,
                planned_bytes=None if planned is None else planned.get(key, 0),
            )
        )
    return tuple(figures)


def ns_figures(reports: Iterable[RankReport]) -> tuple[r.NsFigures, ...]:
    """Return Newton-Schulz work by kernel and algorithm."""
    return tuple(
        r.NsFigures(
            kernel=kernel,
            algorithm=algorithm,
            launches=total.launches,
            matrices=total.matrices,
            seconds=total.seconds,
        )
        for (kernel, algorithm), total in sorted(ns_sums(reports).items())
    )


def step_point(reports: list[RankReport]) -> r.StepPoint:
    """Return one step from the reports of its ranks, lowest rank first."""
    lead = reports[0]
    return r.StepPoint(
        step=lead.step,
        at=lead.at,
        loss=lead.loss,
        grad_norm=lead.grad_norm,
        skipped=lead.skipped,
        tokens=sum(report.tokens_total for report in reports),
        step_seconds=lead.step_seconds,
        lr=lead.lr,
        ranks=len(reports),
        comm=comm_figures(comm_sums(reports)),
        ns=ns_figures(reports),
    )
