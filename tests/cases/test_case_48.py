"""Case 48: whoever was to clear away dies first, and processes, actors and the room that they hold are left."""

from __future__ import annotations

import time

import psutil
import pytest

from orchestrator.cli.own_service import OwnService
from tests.e2e.jobs import small, submit, wait_for, wait_until_ended

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]


def _processes(kind: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words and words[0].startswith(f"ray::{kind}"):
            found.append(process)
    return found


def test_a_supervisor_that_dies_while_it_starts_its_ranks_leaves_no_room_taken(service: OwnService) -> None:
    """The next attempt needs the whole machine: it starts only if nothing of the first one holds any of it.

    Twenty jobs that are cancelled in all states, with everything counted, are part of ``make soak``; ranks that do not
    listen are killed in ``tests/worker/test_supervisor.py``.
    """
    with service.client() as client:
        job = submit(client, small(training={"steps": 3}, failure={"backoff_s": 0.1}))
        wait_for(client, job.id, lambda seen: seen.state == "STARTING")
        deadline = time.monotonic() + 30
        while not (supervisors := _processes("Supervisor")):
            assert time.monotonic() < deadline, "no supervisor appeared"
            time.sleep(0.005)
        supervisors[-1].kill()
        ended = wait_until_ended(client, job.id)
    assert (ended.state, len(ended.attempts)) == ("SUCCEEDED", 2), f"{ended.state} {ended.message} {ended.attempts}"
    assert ended.attempts[0].end_reason == "worker_lost"
    deadline = time.monotonic() + 10
    while left := [*_processes("Supervisor"), *_processes("RankActor")]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
