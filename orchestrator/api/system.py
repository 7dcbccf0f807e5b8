"""Liveness, readiness and Prometheus. Open to all: on loopback that is this machine alone."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from orchestrator.api.service import ServiceOf
from orchestrator.exporter import ProcessFigures, registry_of
from orchestrator.store.jobs import count_by_state

__all__ = ["router"]

router = APIRouter(tags=["system"])
_STALE_S = 60.0


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers. Touches nothing that could block."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(service: ServiceOf) -> JSONResponse:
    """The store answers, and this control plane's reconciler (not another one's) has done a pass lately."""
    with service.database.read() as session:
        jobs = sum(count_by_state(session).values())
    last = service.reconciler.last_pass_at
    fresh = last is not None and service.clock() - last < _STALE_S
    content: dict[str, str | int | float | None] = {
        "status": "ready" if fresh else "not_ready",
        "jobs": jobs,
        "last_pass_at": last,
    }
    content["open_streams"] = service.hub.open_streams
    return JSONResponse(content, 200 if fresh else 503)


@router.get("/metrics")
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
        ),
    )
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
