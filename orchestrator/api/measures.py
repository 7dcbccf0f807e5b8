"""What a job's ranks measured: step series, and the routing table beside what really ran."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from sqlalchemy.orm import Session

from orchestrator import resources as r
from orchestrator.api.auth import Principal, require
from orchestrator.api.build import comm_figures, condition_resource, ns_figures, step_point
from orchestrator.api.service import MAX_INTEGER, ServiceOf, reply
from orchestrator.errors import Conflict, NotFound
from orchestrator.store.attempts import attempts_of, last_attempt, reports_at, reports_of_steps, totals_of
from orchestrator.store.jobs import conditions_of, find_job, plan_of
from orchestrator.store.models import Attempt, Job
from orchestrator.stragglers import Pace, paces
from orchestrator.totals import comm_sums, overlap_of, steps_with_traffic
from worker.contract.messages import RankReport
from worker.contract.plan import PlanReport

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["jobs"])
_PACE_STEPS = 50
"""Steps over which ranks are compared."""
Reader = Annotated[Principal, Depends(require("jobs:read"))]


@router.get("/jobs/{job_id}/metrics", response_model=r.MetricsPage)
def metrics(
    service: ServiceOf,
    _: Reader,
    job_id: str,
    attempt: Annotated[int | None, Query(ge=1, le=MAX_INTEGER, description="Default: the last one")] = None,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Step after which to begin")] = 0,
    limit: Annotated[int, Query(ge=1, le=2000)] = 500,
) -> Response:
    """Steps of an attempt in order; ask again with ``next_after``."""
    with service.database.read() as session:
        row = _attempt(session, find_job(session, job_id), attempt)
        if row is None:
            return reply(r.MetricsPage(attempt=None, points=(), next_after=after))
        steps = reports_of_steps(session, row.id, after, limit)
    points = tuple(step_point(reports) for reports in steps.values())
    next_after = points[-1].step if points else after
    return reply(r.MetricsPage(attempt=row.number, points=points, next_after=next_after))


def _attempt(session: Session, job: Job, number: int | None) -> Attempt | None:
    if number is None:
        return last_attempt(session, job.id)
    for row in attempts_of(session, job.id):
        if row.number == number:
            return row
    raise NotFound(f"job {job.id} has no attempt {number}")


@router.get("/jobs/{job_id}/ranks", response_model=r.RanksResource)
def ranks(service: ServiceOf, _: Reader, job_id: str) -> Response:
    """Where each rank of the last attempt is, and which of them the others wait for."""
    with service.database.read() as session:
        attempt = last_attempt(session, find_job(session, job_id).id)
        if attempt is None:
            return reply(r.RanksResource(attempt=None, ranks=()))
        last = totals_of(session, [attempt.id]).get(attempt.id, {})
        earlier = min((report.step for report in last.values()), default=0) - _PACE_STEPS
        first = {report.rank: report for report in reports_at(session, attempt.id, earlier)}
    found = {pace.rank: pace for pace in paces(first, list(last.values()))}
    return reply(
        r.RanksResource(attempt=attempt.number, ranks=tuple(_rank(last[k], found.get(k)) for k in sorted(last)))
    )


def _rank(report: RankReport, pace: Pace | None) -> r.RankPace:
    return r.RankPace(
        rank=report.rank,
        step=report.step,
        reported_at=report.at,
        memory_bytes=report.memory_bytes,
        steps=None if pace is None else pace.steps,
        own_seconds=None if pace is None else pace.own_s,
        waited_seconds=None if pace is None else pace.waited_s,
        slowdown_ratio=None if pace is None else pace.slowdown_ratio,
    )


@router.get("/jobs/{job_id}/routes", response_model=r.RoutesResource)
def routes(service: ServiceOf, _: Reader, job_id: str) -> Response:
    """The routing table of a job, and what was counted in its last attempt."""
    with service.database.read() as session:
        job = find_job(session, job_id)
        plan, attempt = plan_of(session, job), last_attempt(session, job_id)
        if plan is None:
            raise Conflict(f"job {job_id} is {job.state} and has no plan: there are no routes to show")
        totals = {} if attempt is None else totals_of(session, [attempt.id]).get(attempt.id, {})
        conditions = [condition_resource(row) for row in conditions_of(session, job_id)]
    verification = next((entry for entry in conditions if entry.type == "RoutesVerified"), None)
    return reply(_routes(plan, None if attempt is None else attempt.number, totals, verification))


def _routes(
    plan: PlanReport, attempt: int | None, totals: dict[int, RankReport], verification: r.ConditionResource | None
) -> r.RoutesResource:
    complete = len(totals) == plan.world_size
    step = min((report.step for report in totals.values()), default=0) if complete else 0
    done = min((report.steps_done for report in totals.values()), default=0) if complete else 0
    skipped = max((report.skipped_total - report.withheld_total for report in totals.values()), default=0)
    ns = ns_figures(totals.values())
    return r.RoutesResource(
        optimizer=plan.optimizer,
        plan_hash=plan.plan_hash,
        attempt=attempt,
        step=step,
        parameters=plan.parameters,
        routes=_route_figures(plan, totals, skipped),
        ranks=_rank_figures(plan, totals),
        ns=ns,
        ns_matrices=None if plan.ns_matrices is None else sum(entry.matrices for entry in ns),
        planned_ns_matrices=None if plan.ns_matrices is None else plan.ns_matrices * max(0, done - skipped),
        verification=verification,
    )


def _route_figures(plan: PlanReport, totals: dict[int, RankReport], skipped: int) -> tuple[r.RouteFigures, ...]:
    sums = comm_sums(totals.values())
    planned: dict[tuple[str, str], int] = {}
    for part in plan.traffic:
        steps = sum(max(0, steps_with_traffic(part.phase, report.steps_done, skipped)) for report in totals.values())
        planned[part.route, part.phase] = planned.get((part.route, part.phase), 0)
        planned[part.route, part.phase] += part.total_payload_bytes * steps // plan.world_size
    found = []
    counted = plan.optimizer == "dmuon"
    for route in plan.routes:
        own = {key: total for key, total in sums.items() if key[0] == route.route}
        foreseen = {key: number for key, number in planned.items() if key[0] == route.route}
        found.append(
            r.RouteFigures(
                route=route.route,
                parameters=route.parameters,
                elements=route.elements,
                comm=comm_figures(own, foreseen),
                comm_seconds=sum(total.seconds for total in own.values()) if counted else None,
                exposed_seconds=sum(total.exposed_seconds for total in own.values()) if counted else None,
                payload_bytes=sum(total.payload_bytes for total in own.values()) if counted else None,
                overlap_ratio=overlap_of(own.values()),
            )
        )
    return tuple(found)


def _rank_figures(plan: PlanReport, totals: dict[int, RankReport]) -> tuple[r.RankFigures, ...]:
    cost = sum(rank.cost for rank in plan.ranks)
    seconds = sum(report.owner_compute_seconds or 0.0 for report in totals.values())
    found = []
    for rank in plan.ranks:
        report = totals.get(rank.rank)
        own = None if report is None else report.owner_compute_seconds
        found.append(
            r.RankFigures(
                rank=rank.rank,
                planned_cost=rank.cost,
                planned_share=rank.cost / cost if cost else 0.0,
                planned_matrices=rank.matrices,
                compute_seconds=own,
                measured_share=own / seconds if own is not None and seconds else None,
            )
        )
    return tuple(found)
