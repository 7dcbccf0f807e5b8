"""Planning without running."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from orchestrator.api._examples import SPEC_BODY
from orchestrator.api.auth import Principal, require
from orchestrator.api.jobs import read_spec
from orchestrator.api.service import Body, IdempotencyHeader, Service, ServiceOf, keyed, replay, reply
from orchestrator.paths import check_paths
from orchestrator.store.idempotency import Answer, begin, finish, forget
from orchestrator.store.jobs import keep_plan
from worker.contract.plan import PlanReport
from worker.contract.spec import JobSpec

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["plans"])
Writer = Annotated[Principal, Depends(require("jobs:write"))]
Chip = Annotated[
    str | None,
    Query(max_length=100, description="Predict the cost of a step on it, such as nvidia-h200; default: the planner's"),
]


@router.post("/plans", response_model=PlanReport, openapi_extra=SPEC_BODY)
def plan(
    request: Request,
    service: ServiceOf,
    principal: Writer,
    body: Body,
    key: IdempotencyHeader = None,
    chip: Chip = None,
) -> Response:
    """Plan a job, or refuse it with all reasons. Nothing runs, and no cluster is needed."""
    spec = read_spec(request, body)
    check_paths(spec, service.settings.path_roots)
    claim = keyed(request, principal, key, body)
    if claim.key is None:
        return reply(_planned(service, spec, chip))
    # Planning takes too long for a transaction: the key is claimed in one, and the answer kept in another.
    with service.database.write() as session:
        earlier = begin(session, claim, now=service.clock())
    if earlier is not None:
        return replay(earlier)
    try:
        report = _planned(service, spec, chip)
    except BaseException:
        with service.database.write() as session:
            forget(session, claim)
        raise
    with service.database.write() as session:
        finish(session, claim, Answer(200, report.model_dump_json()))
    return reply(report)


def _planned(service: Service, spec: JobSpec, chip: str | None) -> PlanReport:
    report = service.planner.plan(spec, chip=chip)
    with service.database.write() as session:
        keep_plan(session, report, now=service.clock())
    return report
