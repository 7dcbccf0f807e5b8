"""The database goes away under a running job and comes back: PostgreSQL dies and starts anew, SQLite is locked."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from orchestrator.api.app import create_app
from orchestrator.settings import Settings
from tests.orchestrator.fakes import FakeLauncher, FakePlanner, make_spec
from tests.orchestrator.postgres import Postgres
from worker.contract.states import Reason


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    other = sqlite3.connect(path, isolation_level=None, timeout=30)
    other.execute("BEGIN EXCLUSIVE")
    yield
    time.sleep(2)  # the fault itself: nobody can write for so long
    other.execute("ROLLBACK")
    other.close()


@contextmanager
def _dead(postgres: Postgres) -> Iterator[None]:
    postgres.stop(immediately=True)
    yield
    postgres.start()


def test_nothing_is_lost_while_the_database_is_away(
    settings: Settings, database_kind: str, request: pytest.FixtureRequest
) -> None:
    launcher = FakeLauncher(cpus=2.0)
    app = create_app(settings, launcher, FakePlanner())  # with its threads and the wall clock
    token = settings.token_file.read_text().split()[0]
    with TestClient(app, headers={"Authorization": f"Bearer {token}"}, raise_server_exceptions=False) as client:
        job_id = client.post("/v1/jobs", content=make_spec().model_dump_json()).json()["id"]
        job: Callable[[], Any] = lambda: client.get(f"/v1/jobs/{job_id}").json()  # noqa: E731
        until(lambda: (job_id, 1) in launcher.attempts, "it was never started")
        attempt = launcher.attempts[job_id, 1]
        attempt.milestone("placed")
        attempt.milestone("group_formed")
        attempt.steps(*range(1, 11))
        until(lambda: job()["progress"]["step"] == 10, "the steps were not stored")
        postgres = request.getfixturevalue("postgres") if database_kind == "postgresql" else None
        away = _dead(postgres) if postgres else _locked(settings.state_dir / "service.db")
        with away:
            attempt.steps(*range(11, 41))
            if postgres:  # a writer of SQLite waits, as long as the lock lasts
                headers = {"Idempotency-Key": "asked-again"}
                refused = client.post("/v1/jobs", content=make_spec().model_dump_json(), headers=headers)
                assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable"), refused.text
                assert client.get(f"/v1/jobs/{job_id}").status_code == 503
        body = make_spec().model_dump_json()
        ask = lambda: client.post("/v1/jobs", content=body, headers={"Idempotency-Key": "asked-again"})  # noqa: E731
        until(lambda: ask().status_code == 201, "it never came back")
        attempt.steps(*range(41, 51))
        attempt.end(Reason.COMPLETED)
        until(lambda: job().get("state") == "SUCCEEDED", f"{job()}")
        points = client.get(f"/v1/jobs/{job_id}/metrics?limit=1000").json()["points"]
        assert [(point["step"], point["ranks"]) for point in points] == [(step, 2) for step in range(1, 51)]
        assert len(job()["attempts"]) == 1, "a healthy attempt was given up"
        events = client.get(f"/v1/jobs/{job_id}/events?limit=1000").json()["events"]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert len(client.get("/v1/jobs").json()["jobs"]) == 2, "one job for each key"
