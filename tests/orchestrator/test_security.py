"""What must not be possible: code in a spec, paths that climb, secrets that show."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from orchestrator.api.app import create_app
from orchestrator.settings import Settings
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import FakeClock, FakeLauncher, FakePlanner
from tests.orchestrator.test_api import SPEC, problem
from worker.contract.states import Reason


def opened(settings: Settings, *roots: Path) -> TestClient:
    changed = dataclasses.replace(settings, path_roots=roots, auth=False)
    return TestClient(create_app(changed, FakeLauncher(), FakePlanner(), FakeClock(), reconcile=False))


@pytest.fixture
def database_kind() -> str:
    return "sqlite"  # nothing here depends on the database


PATHS = {
    "/model/path": {"model": {"path": "{}"}},
    "/data/files/0": {"data": {"sequence_length": 8, "files": ["{}"]}},
    "/data/directory": {"data": {"sequence_length": 8, "directory": "{}"}},
    "/data/tokenizer": {"data": {"sequence_length": 8, "tokenizer": "{}"}},
    "/checkpoint/directory": {"checkpoint": {"directory": "{}"}},
    "/checkpoint/resume": {"checkpoint": {"resume": "{}"}},
}


@pytest.mark.parametrize("pointer", PATHS)
def test_paths_stay_where_the_operator_has_opened(settings: Settings, tmp_path: Path, pointer: str) -> None:
    inside, outside = tmp_path / "open", tmp_path / "closed"
    inside.mkdir()
    outside.mkdir()
    (inside / "way-out").symlink_to(outside)
    section, fields = next(iter(PATHS[pointer].items()))

    def post(client: TestClient, path: str) -> object:
        fillings = {"['{}']": [path], "{}": path}
        filled = {name: fillings.get(str(value), value) for name, value in fields.items()}
        return client.post("/v1/jobs?validate_only=true", json=SPEC | {section: filled})

    for path in (f"{inside}/../closed/x", "/a/../../etc/passwd"):
        found = problem(post(opened(settings), path), 422, "spec_invalid")
        assert [(error["pointer"], error["code"]) for error in found["errors"]] == [(pointer, "path_climbs")]
    client = opened(settings, inside)
    for path in (f"{outside}/x", f"{inside}-not/x", f"{inside}/way-out/x", "/etc/passwd"):
        found = problem(post(client, path), 422, "spec_invalid")
        assert [(error["pointer"], error["code"]) for error in found["errors"]] == [(pointer, "path_outside")]
        assert str(inside) in found["errors"][0]["message"]
    assert post(client, f"{inside}/a..b/x").status_code == 200  # type: ignore[attr-defined]
    data = {"sequence_length": 8, "files": ["/etc/*"]}
    problem(client.post("/v1/plans", json=SPEC | {"data": data}), 422, "spec_invalid")


def test_a_spec_holds_no_code(world: World) -> None:
    for field in ("command", "entrypoint", "script", "env", "image", "setup"):
        found = problem(world.client.post("/v1/jobs", json=SPEC | {field: "rm -rf /"}), 422, "spec_invalid")
        assert found["errors"][0]["pointer"] == f"/{field}"
    marker = world.settings.state_dir / "executed"
    body = f"name: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{marker}']]"
    headers = {"Content-Type": "application/yaml"}
    problem(world.client.post("/v1/jobs", content=body, headers=headers), 422, "spec_invalid")
    assert not marker.exists()


def test_tokens_show_nowhere(world: World, caplog: pytest.LogCaptureFixture) -> None:
    token = world.settings.token_file.read_text().split()[0]
    texts = []
    with caplog.at_level(logging.DEBUG):
        job_id = world.submit()
        paths = ("/v1/jobs", f"/v1/jobs/{job_id}", "/v1/audit", "/metrics", "/readyz", "/openapi.json", "/v1/nothing")
        for path in paths:
            texts.append(world.client.get(path).text)
        texts.append(world.client.get("/v1/jobs", headers={"Authorization": f"Bearer {token}x"}).text)
        world.planner.before = lambda: 1 / 0  # type: ignore[assignment, return-value]
        plain = TestClient(world.app, raise_server_exceptions=False, headers=dict(world.client.headers))
        answer = plain.post("/v1/plans", json=SPEC)
        assert answer.status_code == 500 and "ZeroDivisionError" in answer.text and "Traceback" not in answer.text
        texts.append(answer.text)
    assert not [text for text in (*texts, caplog.text) if token in text]


def test_what_is_old_is_removed_and_said(settings: Settings) -> None:
    changed = dataclasses.replace(settings, auth=False, history_s=1000.0)
    launcher, clock = FakeLauncher(), FakeClock()
    app = create_app(changed, launcher, FakePlanner(), clock, reconcile=False)
    client, service = TestClient(app), app.state.service
    job_id = client.post("/v1/jobs", json=SPEC).json()["id"]
    service.reconciler.plan_once()
    service.reconciler.run_once()
    attempt = launcher.attempts[job_id, 1]
    attempt.milestone("group_formed")
    attempt.steps(1, 2, 3)
    attempt.end(Reason.COMPLETED)
    service.reconciler.run_once()
    folder = service.logs.folder(job_id)
    folder.mkdir(parents=True)
    routes = client.get(f"/v1/jobs/{job_id}/routes").json()
    clock.advance(2 * 3600.0)
    service.reconciler.run_once()
    assert client.get(f"/v1/jobs/{job_id}/metrics").json()["points"] == [] and not folder.exists()
    kinds = [event["kind"] for event in client.get(f"/v1/jobs/{job_id}/events").json()["events"]]
    assert kinds.count("pruned") == 1 and "group_formed" not in kinds and kinds.count("state") >= 3
    assert client.get(f"/v1/jobs/{job_id}/routes").json() == routes, "totals stay"
    clock.advance(4 * 3600.0)
    service.reconciler.run_once()
    assert client.get(f"/v1/jobs/{job_id}/events").json()["events"][-1]["kind"] == "pruned", "once"
    assert client.get("/v1/audit").json()["entries"] == []
