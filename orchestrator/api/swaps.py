"""Kernel swaps of running jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from sqlalchemy.orm import Session

from orchestrator import resources as r
from orchestrator.api.auth import Principal, require
from orchestrator.api.service import Body, IdempotencyHeader, ServiceOf, answer_once, keyed, reply
from orchestrator.errors import PreconditionFailed, SwapImpossible
from orchestrator.store.attempts import last_attempt
from orchestrator.store.jobs import find_job
from orchestrator.store.kernels import breaker_rows, policy_for
from orchestrator.store.models import KernelSwap
from orchestrator.store.swaps import find_swap, request_swap, swaps_of
from worker.contract.kernels import KernelTarget, SwapState

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["kernels"])
Reader = Annotated[Principal, Depends(require("jobs:read"))]
Operator = Annotated[Principal, Depends(require("kernels:operate"))]


def _resource(row: KernelSwap) -> r.SwapResource:
    names = ("id", "attempt", "number", "reason", "actor", "requested_at", "changed_at", "epoch", "step", "message")
    return r.SwapResource(
        job=row.job_id,
        target=KernelTarget.model_validate_json(row.target),
        state=SwapState(row.state),
        **{name: getattr(row, name) for name in names},
    )


@router.post("/kernel-swaps", status_code=202, response_model=r.SwapResource)
def swap(
    request: Request,
    service: ServiceOf,
    principal: Operator,
    job_id: str,
    wanted: r.SwapRequest,
    body: Body,
    key: IdempotencyHeader = None,
) -> Response:
    """Swap the kernel, the algorithm or the coefficients of a running job, on all of its ranks at one step."""

    def work(session: Session) -> r.SwapResource:
        _check(session, job_id, wanted)
        row = request_swap(
            session, job_id, last_attempt(session, job_id), wanted.target,
            reason=wanted.reason, actor=principal.name, now=service.clock(),
        )  # fmt: skip
        return _resource(row)

    return answer_once(service, keyed(request, principal, key, body), 202, work)


def _check(session: Session, job_id: str, wanted: r.SwapRequest) -> None:
    find_job(session, job_id)
    policy = policy_for(breaker_rows(session), swaps_of(session, job_id), job_id)
    if wanted.expected_epoch not in (None, policy.epoch):
        raise PreconditionFailed(
            f"the last word on the kernels of job {job_id} has epoch {policy.epoch}, expected_epoch is "
            f"{wanted.expected_epoch}. Look at the job again."
        )
    if wanted.kernel in policy.tripped:
        raise SwapImpossible(
            f"the breaker of {wanted.kernel} is forced open for job {job_id}: it would not run. Reset it first."
        )


@router.get("/kernel-swaps", response_model=r.SwapList)
def listing(service: ServiceOf, _: Reader, job_id: str) -> Response:
    """A job's swaps, oldest first."""
    with service.database.read() as session:
        find_job(session, job_id)
        return reply(r.SwapList(swaps=tuple(map(_resource, swaps_of(session, job_id)))))


@router.get("/kernel-swaps/{swap_id}", response_model=r.SwapResource)
def look(service: ServiceOf, _: Reader, job_id: str, swap_id: str) -> Response:
    """One swap: how far it is, at which step and epoch all ranks changed, or why they went back."""
    with service.database.read() as session:
        return reply(_resource(find_swap(session, job_id, swap_id)))
