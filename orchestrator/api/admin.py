"""Quotas of projects, who holds the GPUs, and the record of changes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response

from orchestrator import resources as r
from orchestrator.api.auth import ADMIN, Principal, require
from orchestrator.api.service import MAX_INTEGER, Body, MatchHeader, ServiceOf, check_match, keyed, note, noted, reply
from orchestrator.errors import NotFound
from orchestrator.gpus import why
from orchestrator.reconcile.admission import usage_by_project
from orchestrator.store.audit import audit_before
from orchestrator.store.models import QuotaRow
from orchestrator.store.quotas import quota_rows, set_quota

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["admin"])
Reader = Annotated[Principal, Depends(require("jobs:read"))]
Admin = Annotated[Principal, Depends(require(ADMIN))]
Project = Annotated[
    str, Path(pattern=r"^(\*|[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?)$", description="A project, or * for every other")
]


@router.get("/quotas", response_model=r.QuotaList)
def quotas(service: ServiceOf, _: Reader) -> Response:
    """What projects may use, and what they use."""
    with service.database.read() as session:
        rows = tuple(_quota(row) for row in quota_rows(session))
        used = {
            project: r.UsageFigures(
                cpus=usage.resources.cpus, gpus=usage.resources.gpus, memory_bytes=usage.resources.memory_bytes,
                jobs=usage.jobs,
            )
            for project, usage in usage_by_project(session).items()
        }  # fmt: skip
    return reply(r.QuotaList(quotas=rows, used=used))


@router.get("/quotas/{project}", response_model=r.QuotaResource)
def quota(service: ServiceOf, _: Reader, project: Project) -> Response:
    """The quota of a project that has one of its own."""
    with service.database.read() as session:
        row = session.get(QuotaRow, project)
        if row is None:
            raise NotFound(f"project {project} has no quota of its own; that of '*' counts, if there is one")
        return reply(_quota(row), headers=_tag(row))


@router.put("/quotas/{project}", response_model=r.QuotaResource)
def change_quota(
    request: Request,
    service: ServiceOf,
    principal: Admin,
    project: Project,
    wanted: r.QuotaChange,
    body: Body,
    if_match: MatchHeader = None,
) -> Response:
    """Set what a project may use at once. Jobs that run already go on."""
    call, now = keyed(request, principal, None, body), service.clock()
    with noted(service, call, project), service.database.write() as session:
        before = session.get(QuotaRow, project)
        check_match(f"the quota of {project}", 0 if before is None else before.version, if_match)
        row = set_quota(session, project, actor=principal.name, now=now, **wanted.model_dump())
        note(service, session, call, project, "200")
        answer, tag = _quota(row), _tag(row)
    service.changed()
    return reply(answer, headers=tag)


def _quota(row: QuotaRow) -> r.QuotaResource:
    return r.QuotaResource.model_validate({name: getattr(row, name) for name in r.QuotaResource.model_fields})


def _tag(row: QuotaRow) -> dict[str, str]:
    return {"ETag": f'"{row.version}"'}


@router.get("/gpus", response_model=r.GpuHolders)
def gpus(service: ServiceOf, _: Admin) -> Response:
    """Who held the GPUs of the cluster at the last look. For the operator: command lines may hold others' secrets."""
    sight = service.reconciler.gpus.sight
    if sight is None:
        return reply(r.GpuHolders())
    nodes = tuple(r.GpuNode(node=look.node, gpus=look.gpus, problem=look.problem) for look in sight.looks)
    holders = tuple(
        r.GpuHolder.model_validate(
            process.model_dump(exclude={"found", "mark"})
            | {"node": look.node, "standing": standing, "why": why(process, standing)}
        )
        for look, process, standing in sight.processes()
    )
    return reply(r.GpuHolders(at=sight.at, nodes=nodes, holders=holders))


@router.get("/audit", response_model=r.AuditPage)
def audit(
    service: ServiceOf,
    _: Admin,
    before: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    target: Annotated[str | None, Query(max_length=255, description="Only what was to change this")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Who changed what, newest first."""
    names = r.AuditEntry.model_fields
    with service.database.read() as session:
        rows = audit_before(session, before, limit, target=target)
    entries = tuple(r.AuditEntry.model_validate({name: getattr(row, name) for name in names}) for row in rows)
    return reply(r.AuditPage(entries=entries, next_before=rows[-1].number if len(rows) == limit else None))
