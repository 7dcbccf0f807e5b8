"""The straggler report: who makes the others wait, by what the ranks counted."""

from __future__ import annotations

import pytest

from orchestrator.stragglers import paces
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import make_report
from worker.contract.messages import RankReport


def report(rank: int, step: int, seconds: float, waited: float) -> RankReport:
    """A rank that has spent ``seconds`` in each of its steps, of them ``waited`` in forwards."""
    found = make_report(rank, step)
    comm = tuple(
        total.model_copy(update={"exposed_seconds": waited * step if total.phase == "forward" else 0.0})
        for total in found.comm
    )
    return found.model_copy(update={"comm": comm, "step_seconds_sum": seconds * step})


def test_the_rank_that_waits_least_is_the_one_that_others_wait_for() -> None:
    last = [report(0, 10, 1.0, 0.6), report(1, 10, 1.0, 0.0), report(2, 10, 1.0, 0.6)]
    found = paces({}, last)
    assert [(pace.rank, pace.steps) for pace in found] == [(0, 10), (1, 10), (2, 10)]
    assert [pace.own_s for pace in found] == pytest.approx([0.4, 1.0, 0.4])
    assert [pace.slowdown_ratio for pace in found] == pytest.approx([1.0, 2.5, 1.0])


def test_only_the_steps_since_the_earlier_report_count() -> None:
    first = {0: report(0, 10, 5.0, 0.0)}
    last = [report(0, 10, 5.0, 0.0).model_copy(update={"step": 14, "step_seconds_sum": 50.0 + 4 * 0.5})]
    (pace,) = paces(first, last)
    assert (pace.steps, pace.own_s) == (4, pytest.approx(0.5))
    assert paces({0: last[0]}, last) == [], "no step since"


def test_it_is_served(world: World) -> None:
    job_id = world.running()
    assert world.client.get(f"/v1/jobs/{job_id}/ranks").json() == {"attempt": 1, "ranks": []}
    attempt = world.attempt(job_id)
    for step in range(1, 4):
        attempt.push(report(0, step, 1.0, 0.8), report(1, step, 1.0, 0.2))
    world.turn()
    ranks = world.client.get(f"/v1/jobs/{job_id}/ranks").json()["ranks"]
    assert [(entry["rank"], entry["step"]) for entry in ranks] == [(0, 3), (1, 3)]
    assert ranks[1]["slowdown_ratio"] == pytest.approx(0.8 / 0.5)
    assert world.client.get("/v1/jobs/nothing/ranks").status_code == 404
