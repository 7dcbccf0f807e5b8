"""Case 48: whoever was to clear away dies first, and processes, actors and the room that they hold are left."""

from __future__ import annotations

import time

import pytest

from orchestrator.cli.own_service import OwnService
from tests.e2e.faults.scene import Scene
from tests.e2e.jobs import small, submit, wait_for, wait_until_ended

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]


def test_a_supervisor_that_dies_while_it_starts_its_ranks_leaves_no_room_taken(service: OwnService) -> None:
    """The next attempt needs the whole machine: it starts only if nothing of the first one holds any of it.

    Twenty jobs that are cancelled in all states, with everything counted, are part of ``make soak``; ranks that do not
    listen are killed in ``tests/worker/test_supervisor.py``.
    """
    with service.client() as client:
        scene = Scene(service, client)  # it looks at this service's Ray alone, whatever else runs on the machine
        before = {process.pid for kind in ("Supervisor", "RankActor") for process in scene.actors(kind)}
        job = submit(client, small(training={"steps": 3}, failure={"backoff_s": 0.1}))
        wait_for(client, job.id, lambda seen: seen.state == "STARTING")
        deadline = time.monotonic() + 30
        while not [process for process in scene.actors("RankActor") if process.pid not in before]:
            assert time.monotonic() < deadline, "no rank appeared"
            time.sleep(0.005)  # killed before that, Ray itself might start the supervisor again
        (own,) = [process for process in scene.actors("Supervisor") if process.pid not in before]
        own.kill()
        ended = wait_until_ended(client, job.id)
        assert (ended.state, len(ended.attempts)) == ("SUCCEEDED", 2), f"{ended.state} {ended.message} {ended.attempts}"
        assert ended.attempts[0].end_reason == "worker_lost"
        deadline = time.monotonic() + 10
        while left := [*scene.actors("Supervisor"), *scene.actors("RankActor")]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
