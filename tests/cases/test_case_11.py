"""Case 11: a restart of the server leaves jobs RUNNING for ever, or starts again what lives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.reconcile.loop import Reconciler
from orchestrator.store.database import Database
from orchestrator.store.jobs import conditions_of, find_job, submit_job
from orchestrator.store.models import Job
from tests.orchestrator.fakes import FakeAttempt, FakeClock, FakeLauncher, FakePlanner, make_spec


class Plane:
    """Control planes over one store and one cluster, each killed by never being asked again."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(f"sqlite:///{folder / 'service.db'}")
        self.database.migrate()
        self.launcher, self.clock = FakeLauncher(), FakeClock()
        self.reconciler = self.another()
        with self.database.write() as session:
            self.job_id = submit_job(session, make_spec(), now=self.clock()).id
        self.turn()
        for name in ("placed", "group_formed"):
            self.attempt().milestone(name)
        self.turn()

    def another(self) -> Reconciler:
        return Reconciler(self.database, self.launcher, FakePlanner(), self.clock)

    def killed_and_started_again(self) -> None:
        """The lease of the dead one runs out in the five seconds that a new one takes to come up."""
        self.clock.advance(5.1)
        self.reconciler = self.another()

    def turn(self, times: int = 2) -> None:
        for _ in range(times):
            self.reconciler.plan_once()
            self.reconciler.run_once()

    def attempt(self) -> FakeAttempt:
        return self.launcher.attempts[self.job_id, 1]

    def job(self) -> Job:
        with self.database.read() as session:
            return find_job(session, self.job_id)

    def reachable(self) -> str:
        with self.database.read() as session:
            return next(row.status for row in conditions_of(session, self.job_id) if row.type == "Reachable")


def _alive(plane: Plane) -> None:
    plane.attempt().steps(1, 2, 3)


def _dead(plane: Plane) -> None:
    plane.attempt().dead = True


def _unreachable(plane: Plane) -> None:
    plane.launcher.unreachable = True


@pytest.mark.parametrize(
    ("happens", "state", "reachable"),
    [(_alive, "RUNNING", "True"), (_dead, "RESTARTING", "True"), (_unreachable, "RUNNING", "Unknown")],
)
def test_what_a_new_control_plane_makes_of_a_running_job(
    tmp_path: Path, happens: Callable[[Plane], None], state: str, reachable: str
) -> None:
    plane = Plane(tmp_path)
    assert plane.job().state == "RUNNING"
    happens(plane)
    plane.killed_and_started_again()
    plane.turn(3)
    assert (plane.job().state, plane.reachable()) == (state, reachable)
    assert len(plane.launcher.attempts) == 1, "nothing was started beside what may live"
    if state == "RUNNING":
        plane.clock.advance(100_000)
        plane.turn(3)
        assert plane.job().state == "RUNNING", "ignorance kills nothing, however long it lasts"
    plane.database.close()
