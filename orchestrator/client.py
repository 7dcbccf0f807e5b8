"""A typed client of the service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from orchestrator import resources as r
from orchestrator._client_admin import AdminCalls
from orchestrator._client_kernels import KernelCalls
from orchestrator._client_life import LifeCalls
from orchestrator._client_streams import StreamCalls, StreamEnd
from orchestrator.errors import Problem, RequestRefused, ServiceUnreachable
from worker.contract.plan import PlanReport

__all__ = ["Client", "StreamEnd"]

M = TypeVar("M", bound=BaseModel)


class Client(AdminCalls, KernelCalls, LifeCalls, StreamCalls):
    """Speaks to one service. Every method raises :class:`RequestRefused` or :class:`ServiceUnreachable`."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )
        self._url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def plan(self, spec: str, *, chip: str | None = None, timeout_s: float = 330.0) -> PlanReport:
        """Plan a spec (YAML or JSON text), with its predicted cost on ``chip`` or the planner's own."""
        params = {} if chip is None else {"chip": chip}
        return self._ask(PlanReport, "POST", "/v1/plans", content=spec, params=params, timeout_s=timeout_s)

    def submit(self, spec: str, *, key: str | None = None, expected_plan_hash: str | None = None) -> r.JobResource:
        """Submit a spec; with a key, asking again is safe."""
        headers = {} if key is None else {"Idempotency-Key": key}
        params = {} if expected_plan_hash is None else {"expected_plan_hash": expected_plan_hash}
        return self._ask(r.JobResource, "POST", "/v1/jobs", content=spec, headers=headers, params=params)

    def jobs(self, **filters: str | int | None) -> r.JobPage:
        """Return a page of jobs; filters are ``state``, ``project``, ``label``, ``page_size`` and ``page_token``."""
        params = {name: str(value) for name, value in filters.items() if value is not None}
        return self._ask(r.JobPage, "GET", "/v1/jobs", params=params)

    def job(self, job_id: str) -> r.JobResource:
        """Return a whole job."""
        return self._ask(r.JobResource, "GET", f"/v1/jobs/{job_id}")

    def _stream(self, path: str, headers: Mapping[str, str], params: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield kind and data of server-sent events, up to the one that says that there are no more."""
        asked = {"Accept": "text/event-stream", **headers}
        try:
            with self._http.stream(
                "GET", path, headers=asked, params=params, timeout=httpx.Timeout(30.0, read=None)
            ) as answer:
                if answer.is_error:
                    answer.read()
                    raise RequestRefused(_problem(answer))
                yield from _events(answer.iter_lines())
        except httpx.HTTPError as error:
            raise ServiceUnreachable(f"{self._url}: {error}") from None

    def metrics(self, job_id: str, *, after: int = 0, limit: int = 500, attempt: int | None = None) -> r.MetricsPage:
        """Return steps of an attempt (by default the last) that follow one."""
        params = {"after": str(after), "limit": str(limit)} | ({} if attempt is None else {"attempt": str(attempt)})
        return self._ask(r.MetricsPage, "GET", f"/v1/jobs/{job_id}/metrics", params=params)

    def routes(self, job_id: str) -> r.RoutesResource:
        """Return the routing table and what was counted."""
        return self._ask(r.RoutesResource, "GET", f"/v1/jobs/{job_id}/routes")

    def _ask(
        self,
        kind: type[M],
        method: str,
        path: str,
        *,
        content: str | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> M:
        wait = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        try:
            answer = self._http.request(method, path, content=content, headers=headers, params=params, timeout=wait)
        except httpx.HTTPError as error:
            raise ServiceUnreachable(f"{self._url}: {error}. Is it up? 'dmuonctl up' starts it.") from None
        if answer.is_error:
            raise RequestRefused(_problem(answer))
        return kind.model_validate_json(answer.content)


def _problem(answer: httpx.Response) -> Problem:
    try:
        return Problem.model_validate_json(answer.content)
    except ValidationError:
        title = "The answer is no problem document"
        return Problem(
            type="about:blank", title=title, status=answer.status_code, detail=answer.text[:500], code="http"
        )


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    kind, data = "message", ""
    for line in lines:
        if line.startswith("event:"):
            kind = line[6:].strip()
        elif line.startswith("data:"):
            data += line[5:].strip()
        elif not line and data:
            yield kind, data
            if kind == "end":
                return
            kind, data = "message", ""
