"""Requests made from the OpenAPI document: no 5xx, no answer that the document does not have."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from orchestrator.api.app import create_app
from orchestrator.settings import Settings
from tests.orchestrator.fakes import FakeClock, FakeLauncher, FakePlanner, make_spec
from worker.contract.states import Reason

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip
EXAMPLES = 12
"""Of each operation, of requests that fit the document and of such that do not."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder: Path = tmp_path_factory.mktemp("schema")
    settings = Settings(state_dir=folder, auth=False)
    app = create_app(settings, FakeLauncher(), FakePlanner(), FakeClock(), reconcile=False)
    with TestClient(app, raise_server_exceptions=False) as found:
        yield found


@pytest.fixture(scope="module")
def known(client: TestClient) -> dict[str, str]:
    """Ids that exist, so that requests come further than to a 404."""
    service = client.app.state.service  # type: ignore[attr-defined]
    launcher = service.reconciler.context.launcher
    job_id = client.post("/v1/jobs", content=make_spec().model_dump_json()).json()["id"]
    for _ in range(3):
        service.reconciler.plan_once()
        service.reconciler.run_once()
        if (job_id, 1) in launcher.attempts and len(launcher.attempts[job_id, 1].entries) == 0:
            launcher.attempts[job_id, 1].milestone("group_formed")
            launcher.attempts[job_id, 1].steps(1, 2)
    launcher.attempts[job_id, 1].end(Reason.COMPLETED)
    service.reconciler.run_once()
    return {"job_id": job_id, "kernel": "quack", "project": "default"}


def test_every_operation(client: TestClient, known: dict[str, str]) -> None:
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    seen: Counter[str] = Counter()
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        for mode in GenerationMode:
            _try(operation, mode, client, known, seen)
    assert len(operations) == sum(len(path) for path in client.get("/openapi.json").json()["paths"].values())
    assert seen["unsent"] <= len(operations), seen
    assert seen["2xx"] >= len(operations) and seen["4xx"] >= len(operations), seen


def _try(
    operation: APIOperation, mode: GenerationMode, client: TestClient, known: dict[str, str], seen: Counter[str]
) -> None:
    numbers = iter(range(10**6))

    @hypothesis_settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        if next(numbers) % 2:
            case.path_parameters.update({name: known[name] for name in case.path_parameters if name in known})
        asked = case.as_transport_kwargs(base_url="http://testserver")
        names = ("method", "url", "params", "headers", "json")
        words = {name: asked[name] for name in names if asked.get(name) is not None}
        data = asked.get("data")
        if data is not None:
            words["content"] = data if isinstance(data, bytes | str) else str(data)
        if "text/event-stream" in str(words.get("headers", {}).get("accept", "")):
            return  # a stream of a job that lives has no end
        try:
            answer = client.request(**words)
        except (httpx2.InvalidURL, UnicodeEncodeError):  # too long, or a header beyond ASCII: no server hears of it
            seen["unsent"] += 1
            return
        seen[f"{answer.status_code // 100}xx"] += 1
        case.validate_response(answer, checks=CHECKS)

    with contextlib.suppress(Unsatisfiable) if mode is GenerationMode.NEGATIVE else contextlib.nullcontext():
        check()  # where nothing can be wrong there is no request that is
