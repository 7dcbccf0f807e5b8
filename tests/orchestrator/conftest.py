"""A service over a store, with a cluster, a planner and a clock that tests drive.

A test that asks for ``world``, ``database`` or ``database_url`` runs on SQLite and on PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from orchestrator.api.app import create_app, service_of
from orchestrator.reconcile.loop import Reconciler
from orchestrator.settings import Settings
from orchestrator.store.database import Database
from tests.orchestrator.fakes import FakeAttempt, FakeClock, FakeLauncher, FakePlanner, make_spec
from tests.orchestrator.postgres import Postgres, find_postgres, running_postgres


@dataclass
class World:
    """Everything of one service; :meth:`turn` is one pass of its reconciler."""

    app: FastAPI
    client: TestClient
    database: Database
    reconciler: Reconciler
    launcher: FakeLauncher
    planner: FakePlanner
    clock: FakeClock
    settings: Settings

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.reconciler.plan_once()
            self.reconciler.run_once()

    def submit(self, **changes: object) -> str:
        answer = self.client.post("/v1/jobs", content=make_spec(**changes).model_dump_json())
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict[str, object]:
        answer = self.client.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found

    def state(self, job_id: str) -> object:
        return self.job(job_id)["state"]

    def attempt(self, job_id: str, number: int = 1) -> FakeAttempt:
        return self.launcher.attempts[job_id, number]

    def running(self, **changes: object) -> str:
        """Submit a job and bring it to RUNNING."""
        job_id = self.submit(**changes)
        self.turn()
        self.attempt(job_id).milestone("placed")
        self.attempt(job_id).milestone("group_formed")
        self.turn()
        assert self.state(job_id) == "RUNNING"
        return job_id


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with running_postgres(programs) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_url(database_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """URL of a database without tables."""
    if database_kind == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.empty()


@pytest.fixture
def database_url(database_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """URL of a database with all tables, or of none yet."""
    if database_kind == "sqlite":
        return f"sqlite:///{tmp_path / 'service.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.migrated()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = Database(database_url)
    found.migrate()
    yield found
    found.close()


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    return Settings(state_dir=tmp_path, database=database_url, metrics_grace_s=60.0)


@pytest.fixture
def world(settings: Settings) -> Iterator[World]:
    launcher, planner, clock = FakeLauncher(), FakePlanner(), FakeClock()
    app = create_app(settings, launcher, planner, clock, reconcile=False)
    service = service_of(app)
    token = settings.token_file.read_text().split()[0]
    with TestClient(app, headers={"Authorization": f"Bearer {token}"}) as client:
        yield World(app, client, service.database, service.reconciler, launcher, planner, clock, settings)
