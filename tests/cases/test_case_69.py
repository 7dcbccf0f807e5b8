"""Case 69: starts are tried again without limit or pause; a late worker of one attempt reports into the next."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from orchestrator.errors import LauncherUnavailable, SupervisorGone
from orchestrator.launcher_api import AttemptRef
from tests.cases.test_case_11 import Plane
from worker.contract.messages import AttemptStart, Entry, Milestone
from worker.contract.states import Reason


def test_attempts_that_fail_are_bounded_and_their_pauses_grow(tmp_path: Path) -> None:
    plane, begun = Plane(tmp_path), []
    while plane.job().state != "FAILED":
        number = max(number for _, number in plane.launcher.attempts)
        begun.append(plane.clock())
        plane.launcher.attempts[plane.job_id, number].end(Reason.WORKER_LOST, "gone")
        plane.turn()
        waits = plane.clock() + 100
        while plane.job().state == "RESTARTING":
            assert plane.clock() < waits
            plane.clock.advance(0.5)
            plane.turn(1)
        plane.turn()
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert pauses == pytest.approx([2.0, 4.0, 8.0], abs=0.5)
    assert len(plane.launcher.attempts) == 4, "the first, and three restarts"


def test_a_launch_that_may_have_worked_is_asked_for_again_and_makes_one_attempt(tmp_path: Path) -> None:
    plane, asked = Plane(tmp_path), []
    plane.attempt().end(Reason.WORKER_LOST)
    start = plane.launcher.start_attempt

    def unsure(attempt: AttemptStart) -> None:
        start(attempt)
        asked.append(attempt.fence)
        if len(asked) < 5:
            raise LauncherUnavailable("no answer came back")

    plane.launcher.start_attempt = unsure  # type: ignore[method-assign]
    plane.turn()
    plane.clock.advance(3)
    plane.turn(8)
    assert len(asked) == 5 and len(set(asked)) == 1, "five times the same attempt"
    assert sorted(number for _, number in plane.launcher.attempts) == [1, 2]


def test_what_the_first_attempt_says_later_does_not_reach_the_second(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    first = plane.attempt()
    first.end(Reason.WORKER_LOST)
    plane.turn()
    plane.clock.advance(3)
    plane.turn(3)
    second = plane.launcher.attempts[plane.job_id, 2]
    assert first.start.fence != second.start.fence
    first.entries.append(Entry(seq=9, body=Milestone(name="group_formed", at=9.0, message="too late")))
    plane.turn(3)
    assert plane.job().state == "STARTING", "it is the second that must form a group"
    with pytest.raises(SupervisorGone):
        plane.launcher.poll(AttemptRef(plane.job_id, 1, first.start.fence), 0, 10)
