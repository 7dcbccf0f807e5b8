"""Routes of jobs: submit, list, look, cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from orchestrator import resources as r
from orchestrator.api._examples import SPEC_BODY
from orchestrator.api.auth import Principal, require
from orchestrator.api.build import job_resource, job_summary
from orchestrator.api.service import (
    Body,
    IdempotencyHeader,
    MatchHeader,
    Service,
    ServiceOf,
    answer_once,
    check_match,
    keyed,
    reply,
)
from orchestrator.errors import InvalidInput, UnsupportedType, as_service_error
from orchestrator.paths import check_paths
from orchestrator.store.idempotency import KeyedRequest
from orchestrator.store.jobs import JobFilter, cancel_job, find_job, list_jobs, submit_job
from orchestrator.store.models import Job
from orchestrator.store.quotas import check_queue_room
from orchestrator.store.stops import pause_job, resume_job
from orchestrator.store.transitions import locked_job
from worker.contract.errors import ContractError, FieldError
from worker.contract.load import load_spec
from worker.contract.spec import JobSpec
from worker.contract.states import JobState

__all__ = ["read_spec", "router"]

router = APIRouter(prefix="/v1", tags=["jobs"])
Reader = Annotated[Principal, Depends(require("jobs:read"))]
Writer = Annotated[Principal, Depends(require("jobs:write"))]
PlanHash = Annotated[str | None, Query(max_length=128, description="Refuse the job unless its plan has this hash")]
PlanHashHeader = Annotated[str | None, Header(alias="Expected-Plan-Hash", max_length=128)]

_TYPES = ("", "application/json", "application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml", "text/plain")


def read_spec(request: Request, body: bytes) -> JobSpec:
    """Return the spec in a request's body, which is YAML or JSON.

    Raises:
        SpecInvalidProblem: with every mistake.
        UnsupportedType: the content type is another one.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _TYPES:
        raise UnsupportedType(f"Content-Type is {kind!r}; send application/yaml or application/json")
    try:
        return load_spec(body)
    except ContractError as error:
        raise as_service_error(error) from None


@router.post(
    "/jobs",
    status_code=201,
    response_model=r.JobResource,
    responses={200: {"model": r.Validation, "description": "Of ``validate_only``: the spec is right"}},
    openapi_extra=SPEC_BODY,
)
def submit(
    request: Request,
    service: ServiceOf,
    principal: Writer,
    body: Body,
    key: IdempotencyHeader = None,
    validate_only: bool = False,
    expected_plan_hash: PlanHash = None,
    expected: PlanHashHeader = None,
) -> Response:
    """Submit a job; with ``validate_only`` only say whether its spec is right."""
    spec = read_spec(request, body)
    check_paths(spec, service.settings.path_roots)
    if validate_only:
        return reply(r.Validation(spec=spec))
    wanted = expected_plan_hash or expected
    return answer_once(
        service,
        keyed(request, principal, key, body),
        201,
        lambda session: _submitted(service, session, spec, wanted),
    )


def _submitted(service: Service, session: Session, spec: JobSpec, plan_hash: str | None) -> r.JobResource:
    check_queue_room(session, spec.project)
    return job_resource(session, submit_job(session, spec, now=service.clock(), expected_plan_hash=plan_hash))


@router.get("/jobs", response_model=r.JobPage)
def listing(
    service: ServiceOf,
    _: Reader,
    state: JobState | None = None,
    project: Annotated[str | None, Query(max_length=63)] = None,
    label: Annotated[str | None, Query(description="key=value")] = None,
    page_size: Annotated[int, Query(ge=1, le=200)] = 50,
    page_token: str | None = None,
) -> Response:
    """List jobs, newest first."""
    wanted = JobFilter(state=state, project=project, label=_label(label))
    with service.database.read() as session:
        rows, token = list_jobs(session, wanted, page_size=page_size, page_token=page_token)
        return reply(r.JobPage(jobs=tuple(map(job_summary, rows)), next_page_token=token))


def _label(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    key, equals, value = text.partition("=")
    if not equals or not key:
        error = FieldError(pointer="/query/label", code="unreadable", message=f"found {text!r}, expected key=value")
        raise InvalidInput("the label filter cannot be read", (error,))
    return key, value


@router.get("/jobs/{job_id}", response_model=r.JobResource)
def look(service: ServiceOf, _: Reader, job_id: str) -> Response:
    """Everything about a job."""
    with service.database.read() as session:
        job = find_job(session, job_id)
        return reply(job_resource(session, job), headers={"ETag": f'"{job.version}"'})


def _move(
    service: Service, call: KeyedRequest, job_id: str, if_match: str | None, move: Callable[..., Job]
) -> Response:
    """Answer with the job after ``move(session, job_id, now=...)``, once for each key."""

    def work(session: Session) -> r.JobResource:
        check_match(f"job {job_id}", locked_job(session, job_id).version, if_match)
        return job_resource(session, move(session, job_id, now=service.clock()))

    return answer_once(service, call, 200, work)


@router.post("/jobs/{job_id}:cancel", response_model=r.JobResource)
def cancel(
    request: Request, service: ServiceOf, principal: Writer, job_id: str, body: Body, key: IdempotencyHeader = None,
    if_match: MatchHeader = None,
) -> Response:  # fmt: skip
    """Cancel a job: at once where nothing runs, else gracefully. Asking again is harmless."""
    return _move(service, keyed(request, principal, key, body), job_id, if_match, cancel_job)


@router.post("/jobs/{job_id}:pause", response_model=r.JobResource)
def pause(
    request: Request, service: ServiceOf, principal: Writer, job_id: str, body: Body, key: IdempotencyHeader = None,
    if_match: MatchHeader = None,
) -> Response:  # fmt: skip
    """Pause a job: it saves a checkpoint and releases what it holds. Asking again is harmless."""
    return _move(service, keyed(request, principal, key, body), job_id, if_match, pause_job)


@router.post("/jobs/{job_id}:resume", response_model=r.JobResource)
def resume(
    request: Request, service: ServiceOf, principal: Writer, job_id: str, body: Body, key: IdempotencyHeader = None,
    if_match: MatchHeader = None,
) -> Response:  # fmt: skip
    """Put a paused job back into the queue; it continues from its newest checkpoint."""
    return _move(service, keyed(request, principal, key, body), job_id, if_match, resume_job)
