"""Case 51: a rank that reports late, less or not at all stalls the others, or the whole job."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.orchestrator.conftest import World, database_url, postgres, settings, world
from tests.orchestrator.fakes import make_report
from worker.actors import _sender
from worker.actors._sender import Sender
from worker.contract.states import Reason

__all__ = ["database_url", "postgres", "settings", "world"]


@pytest.fixture
def database_kind() -> str:
    return "sqlite"  # nothing here depends on the database


def test_a_supervisor_that_takes_nothing_holds_up_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on, the queue is bounded, and how many were dropped is told with the first batch that is taken."""
    asked, answer = threading.Event(), threading.Event()
    taken: list[tuple[int, int]] = []

    class Supervisor:
        def remote(self, _fence: str, batch: list[str], dropped: int) -> tuple[int, int]:
            return len(batch), dropped

        push = property(lambda self: self)

    class Ray:
        @staticmethod
        def get(call: tuple[int, int], timeout: float) -> Any:
            asked.set()
            assert answer.wait(30)
            taken.append(call)

    monkeypatch.setattr(_sender, "ray", Ray)
    sender = Sender(Supervisor(), "fence", 100, 1)
    sender.put(make_report(1, 1))
    assert asked.wait(30), "the first is under way, and will not be taken for long"
    for step in range(2, 1002):
        sender.put(make_report(1, step))  # would never return if it waited for the supervisor
    answer.set()
    sender.close()
    assert taken == [(1, 0), (100, 900)]


def test_a_rank_that_stops_reporting_is_seen_and_holds_up_nobody(world: World) -> None:
    job_id = world.running()
    attempt = world.attempt(job_id)
    attempt.steps(1, 2)
    attempt.push(make_report(1, 3))
    for step in range(3, 9):
        attempt.push(make_report(0, step))
        world.turn()
    ranks: Any = world.client.get(f"/v1/jobs/{job_id}/ranks").json()["ranks"]
    assert [(entry["rank"], entry["step"]) for entry in ranks] == [(0, 8), (1, 3)], "who is behind, and where"
    points: Any = world.client.get(f"/v1/jobs/{job_id}/metrics").json()["points"]
    assert [(point["step"], point["ranks"]) for point in points] == [
        (1, 2), (2, 2), (3, 2), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1),
    ]  # fmt: skip
    progress: Any = world.job(job_id)["progress"]
    assert progress["step"] == 3, "a step is done when all ranks have said so"
    attempt.push(*(make_report(1, step) for step in range(4, 9)))  # late, all at once
    attempt.end(Reason.COMPLETED)
    world.turn()
    assert world.state(job_id) == "SUCCEEDED"
    points = world.client.get(f"/v1/jobs/{job_id}/metrics").json()["points"]
    assert {point["ranks"] for point in points} == {2}
