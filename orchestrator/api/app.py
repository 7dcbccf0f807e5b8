"""Putting the HTTP side together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ExceptionHandler

from orchestrator.api import admin, inspect, jobs, kernels, live, measures, plans, streams, swaps, system
from orchestrator.api.auth import Authenticator
from orchestrator.api.document import PROBLEM_ANSWERS, document_of
from orchestrator.api.following import look_at_topics
from orchestrator.api.hub import Hub, Pages
from orchestrator.api.limits import BodyLimitMiddleware
from orchestrator.api.refusal_budget import RefusalBudget
from orchestrator.api.refusals import note_refusal
from orchestrator.api.service import Service
from orchestrator.clock import Clock, wall_clock
from orchestrator.errors import (
    PROBLEM_TYPE,
    Forbidden,
    InvalidInput,
    Problem,
    ServiceError,
    StoreUnavailable,
    Unauthorized,
    error_of_status,
    field_errors_of,
)
from orchestrator.launcher_api import Launcher
from orchestrator.logs import LogStore
from orchestrator.planner import Planner
from orchestrator.reconcile.loop import Reconciler
from orchestrator.reports import ReportStore
from orchestrator.settings import Settings, ensure_secret
from orchestrator.store.database import Database
from orchestrator.timings import Histogram, TimingMiddleware

__all__ = ["create_app", "service_of"]

_log = logging.getLogger(__name__)


def create_app(
    settings: Settings, launcher: Launcher, planner: Planner, clock: Clock = wall_clock, *, reconcile: bool = True
) -> FastAPI:
    """Return the application; its lifespan runs the reconciler unless ``reconcile`` is False."""
    service = _service(settings, launcher, planner, clock)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if reconcile:
            service.reconciler.start()
        watching = asyncio.ensure_future(
            service.hub.watch(lambda topics: run_in_threadpool(look_at_topics, service, topics))
        )
        yield
        service.hub.stop()
        watching.cancel()
        async with anyio.create_task_group() as ends:
            ends.start_soon(run_in_threadpool, planner.close)
            ends.start_soon(run_in_threadpool, service.reconciler.stop)
        await run_in_threadpool(launcher.close)
        service.database.close()

    app = FastAPI(
        title="dmuon",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=PROBLEM_ANSWERS,
    )
    app.openapi = partial(document_of, app)  # type: ignore[method-assign]
    app.state.service = service
    for module in (admin, inspect, jobs, plans, streams, measures, kernels, swaps, system, live):
        app.include_router(module.router)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_request_bytes, timeout_s=settings.request_timeout_s)
    app.add_middleware(TimingMiddleware, histogram=service.http_seconds)
    return app


def service_of(app: FastAPI) -> Service:
    """Return the parts of an application that :func:`create_app` made."""
    return cast(Service, app.state.service)


def _service(settings: Settings, launcher: Launcher, planner: Planner, clock: Clock) -> Service:
    database, pass_seconds = Database(settings.database_url), Histogram()
    hub, logs = Hub(settings.max_streams), LogStore(settings.state_dir / "logs", settings.log_quota_bytes)
    database.migrate()
    authenticator = Authenticator.open_to_all()
    if settings.auth:
        ensure_secret(settings.token_file)
        authenticator = Authenticator.from_file(settings.token_file)
    reconciler = Reconciler(
        database,
        launcher,
        planner,
        clock,
        interval_s=settings.poll_interval_s,
        lease_s=settings.lease_s,
        changed=hub.notify,
        timed=pass_seconds.observe,
        checkpoints=settings.state_dir / "checkpoints",
        logs=logs,
        reports=ReportStore(settings.state_dir / "reports"),
        history_s=settings.history_s,
        gpu_look_s=settings.gpu_look_s,
    )
    return Service(
        settings=settings,
        database=database,
        planner=planner,
        reconciler=reconciler,
        authenticator=authenticator,
        hub=hub,
        pages=Pages(),
        logs=logs,
        clock=clock,
        refusals=RefusalBudget(clock),
        http_seconds=Histogram(),
        pass_seconds=pass_seconds,
    )


def _answer(request: Request, error: ServiceError, headers: Mapping[str, str] | None = None) -> Response:
    problem = Problem.of(error, instance=request.url.path)
    headers = {"WWW-Authenticate": "Bearer"} if error.code == "unauthorized" else dict(headers or {})
    return Response(problem.model_dump_json(), status_code=problem.status, media_type=PROBLEM_TYPE, headers=headers)


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    if isinstance(error, Unauthorized | Forbidden):
        await run_in_threadpool(note_refusal, request.app.state.service, request, error)
    return _answer(request, error)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    refusal = InvalidInput("the request is wrong: see errors", field_errors_of(error.errors()))
    if request.method not in ("GET", "HEAD"):
        await run_in_threadpool(note_refusal, request.app.state.service, request, refusal)
    return _answer(request, refusal)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ServiceError):  # the framework wraps what was raised while it read a body
        return _answer(request, error.__cause__)
    return _answer(request, error_of_status(error.status_code, str(error.detail)), error.headers)


async def _on_store_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OperationalError | PoolTimeout)
    _log.error("%s %s: the database failed: %s", request.method, request.url.path, error)
    return _answer(request, StoreUnavailable("the database does not answer now; ask again later"))


async def _on_any_error(request: Request, error: Exception) -> Response:
    return _answer(request, ServiceError(f"the service failed with {type(error).__name__}; its log says more"))


_HANDLERS: dict[type[Exception], ExceptionHandler] = {
    ServiceError: _on_service_error,
    RequestValidationError: _on_request_error,
    HTTPException: _on_http_error,
    OperationalError: _on_store_error,
    PoolTimeout: _on_store_error,
    Exception: _on_any_error,
}
