"""Kernels and their breakers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from orchestrator import resources as r
from orchestrator.api.auth import Principal, require
from orchestrator.api.service import Body, MatchHeader, Service, ServiceOf, check_match, keyed, note, noted, reply
from orchestrator.errors import BreakerAbsent, NotFound, PlannerFailed
from orchestrator.store.attempts import last_attempt
from orchestrator.store.jobs import LIVE, jobs_in
from orchestrator.store.kernels import (
    ALL,
    SWITCHABLE,
    breaker_rows,
    effective_states,
    history,
    set_breaker,
    version_of,
)
from orchestrator.store.models import BreakerTransition, RuntimeTransition
from orchestrator.store.swaps import runtime_rows
from worker.contract.kernels import FALLBACK_KERNEL, BreakerState, Kernel, KernelAvailability

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["kernels"])
Reader = Annotated[Principal, Depends(require("jobs:read"))]
Operator = Annotated[Principal, Depends(require("kernels:operate"))]
_STATES = {
    "trip": BreakerState.FORCED_OPEN,
    "force": BreakerState.FORCED_OPEN,
    "reset": BreakerState.CLOSED,
    "disable": BreakerState.DISABLED,
    "observe": BreakerState.METRICS_ONLY,
}
_SHOWN = 20
"""Words of a breaker's history that an answer has."""


@router.get("/kernels", response_model=r.KernelList)
def kernels(service: ServiceOf, _: Reader) -> Response:
    """All kernels: whether they can run where the planner runs, and their breakers."""
    available, why = _availability(service)
    with service.database.read() as session:
        states = effective_states(breaker_rows(session), ALL)
    found = []
    for kernel in Kernel:
        known = available.get(kernel)
        found.append(
            r.KernelResource(
                kernel=kernel,
                available=None if known is None else known.available,
                detail=why if known is None else known.detail,
                breaker=states.get(kernel),
            )
        )
    return reply(r.KernelList(kernels=tuple(found)))


def _availability(service: Service) -> tuple[dict[Kernel, KernelAvailability], str]:
    try:
        return {entry.kernel: entry for entry in service.planner.kernels()}, "the planner does not say"
    except PlannerFailed as error:
        return {}, f"unknown: {error.detail}"


def _switchable(name: str) -> Kernel:
    if name not in set(Kernel):
        raise NotFound(f"there is no kernel {name!r}; those with a breaker are {', '.join(SWITCHABLE)}")
    kernel = Kernel(name)
    if kernel is FALLBACK_KERNEL:
        raise BreakerAbsent(
            f"{kernel} is the fallback that runs in place of a tripped kernel, so it cannot be tripped itself. "
            f"To get work off it, reset the breaker of the kernel you want: {', '.join(SWITCHABLE)}."
        )
    if kernel is Kernel.AUTO:
        raise BreakerAbsent(
            f"'auto' is a choice and not a kernel: trip the kernel that it chose, one of {', '.join(SWITCHABLE)}."
        )
    return kernel


def _breaker(session: Session, kernel: Kernel) -> r.BreakerResource:
    rows = [row for row in breaker_rows(session) if row.kernel == kernel]
    common = next((row for row in rows if row.scope == ALL), None)
    return r.BreakerResource(
        kernel=kernel,
        state=BreakerState.CLOSED if common is None else BreakerState(common.state),
        reason="" if common is None else common.reason,
        actor="" if common is None else common.actor,
        changed_at=None if common is None else common.changed_at,
        epoch=version_of(session, kernel),
        jobs={row.scope: BreakerState(row.state) for row in rows if row.scope != ALL},
        expires_at=None if common is None else common.expires_at,
        runtime=_runtime(session, kernel),
        history=tuple(_word(row) for row in history(session, kernel, _SHOWN)),
    )


def _word(row: BreakerTransition) -> r.BreakerWord:
    names = r.BreakerWord.model_fields
    return r.BreakerWord.model_validate({name: getattr(row, name) for name in names})


def _moved(row: RuntimeTransition) -> r.RuntimeBreaker:
    names = ("attempt", "size_class", "dtype", "reason", "step", "at")
    fields = {name: getattr(row, name) for name in names}
    return r.RuntimeBreaker(job=row.job_id, state=BreakerState(row.to_state), **fields)


def _runtime(session: Session, kernel: Kernel) -> tuple[r.RuntimeBreaker, ...]:
    """Breakers of live jobs that moved by themselves and are not closed."""
    found: list[r.RuntimeBreaker] = []
    for job in jobs_in(session, *LIVE):
        attempt = last_attempt(session, job.id)
        rows = [] if attempt is None else runtime_rows(session, job.id, attempt.number)
        found += [_moved(row) for row in rows if row.kernel == kernel and row.to_state != BreakerState.CLOSED]
    return tuple(found)


def _tag(breaker: r.BreakerResource) -> dict[str, str]:
    return {"ETag": f'"{breaker.epoch}"'}


@router.get("/kernels/{kernel}/breaker", response_model=r.BreakerResource)
def look(service: ServiceOf, _: Reader, kernel: str) -> Response:
    """The breaker of a kernel."""
    with service.database.read() as session:
        breaker = _breaker(session, _switchable(kernel))
    return reply(breaker, headers=_tag(breaker))


@router.put("/kernels/{kernel}/breaker", response_model=r.BreakerResource)
def change(
    request: Request,
    service: ServiceOf,
    principal: Operator,
    kernel: str,
    wanted: r.BreakerChange,
    body: Body,
    if_match: MatchHeader = None,
) -> Response:
    """Trip, reset, pin or observe a breaker, for the jobs that live and those to come, or for one job."""
    call, now = keyed(request, principal, None, body), service.clock()
    with noted(service, call, kernel if kernel in set(Kernel) else ""), service.database.write() as session:
        which = _switchable(kernel)
        check_match(f"the breaker of {which}", version_of(session, which), if_match)
        set_breaker(
            session,
            which,
            _STATES[wanted.action],
            scope=wanted.scope,
            reason=wanted.reason,
            actor=principal.name,
            now=now,
            expires_at=None if wanted.expires_in_s is None else now + wanted.expires_in_s,
        )
        session.flush()
        note(service, session, call, str(which), "200")
        breaker = _breaker(session, which)
    service.changed()
    return reply(breaker, headers=_tag(breaker))
