"""Liveness, readiness and Prometheus. Open to all: on loopback that is this machine alone."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from orchestrator._resource import Resource
from orchestrator.api.service import ServiceOf, reply
from orchestrator.exporter import ProcessFigures, registry_of
from orchestrator.store.jobs import count_by_state

__all__ = ["router"]

router = APIRouter(tags=["system"])
_STALE_S = 60.0


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers. Touches nothing that could block."""
    return {"status": "ok"}


class Readiness(Resource):
    """Whether the service can do its work."""

    status: Literal["ready", "not_ready"]
    jobs: int
    last_pass_at: float | None
    open_streams: int


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness, "description": "Not ready"}})
def readyz(service: ServiceOf) -> Response:
    """The store answers, and this control plane's reconciler (not another one's) has done a pass lately."""
    with service.database.read() as session:
        jobs = sum(count_by_state(session).values())
    last = service.reconciler.last_pass_at
    fresh = last is not None and service.clock() - last < _STALE_S
    status: Literal["ready", "not_ready"] = "ready" if fresh else "not_ready"
    found = Readiness(status=status, jobs=jobs, last_pass_at=last, open_streams=service.hub.open_streams)
    return reply(found, status=200 if fresh else 503)


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(service: ServiceOf) -> Response:
    """All series in Prometheus' text format."""
    registry = registry_of(
        service.database,
        service.clock,
        grace_s=service.settings.metrics_grace_s,
        series_budget=service.settings.metrics_series_budget,
        figures=ProcessFigures(
            http_seconds=service.http_seconds,
            pass_seconds=service.pass_seconds,
            last_pass_at=service.reconciler.last_pass_at,
            open_streams=service.hub.open_streams,
            capacity=service.reconciler.capacity,
            gpus=service.reconciler.gpus.sight,
        ),
    )
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
