"""What follows an attempt: budgets, pauses, and which end is never tried again."""

from __future__ import annotations

import pytest

from orchestrator.launcher_api import Resources
from orchestrator.reconcile.decide import End
from orchestrator.reconcile.preemption import Claim, decide_victims
from orchestrator.reconcile.restarts import Next, Past, decide_next, is_restartable
from tests.orchestrator.fakes import make_spec
from worker.contract.states import Blame, JobState, Reason


def following(*past: tuple[Reason, int], **failure: float) -> Next:
    spec = make_spec(failure={"backoff_s": 2.0, "backoff_max_s": 10.0, **failure})
    rows = [Past(reason=reason, steps=steps) for reason, steps in past]
    return decide_next(End(reason=rows[-1].reason, message="so it was"), rows, spec)


@pytest.mark.parametrize("reason", [reason for reason in Reason if not is_restartable(reason)])
def test_other_ends_are_final_whatever_the_budgets(reason: Reason) -> None:
    found = following((reason, 3), infrastructure_restarts=9, user_error_restarts=9)
    assert (found.state, found.message) == (reason.end_state, "so it was")


@pytest.mark.parametrize("reason", [Reason.WORKER_LOST, Reason.NODE_LOST, Reason.STALLED, Reason.INTERNAL])
def test_lost_infrastructure_is_tried_again_until_the_budget_is_spent(reason: Reason) -> None:
    assert reason.blame in (Blame.INFRASTRUCTURE, Blame.PLATFORM)
    found = [following(*[(reason, 5)] * number) for number in range(1, 5)]
    assert [one.state for one in found] == [JobState.RESTARTING] * 3 + [JobState.FAILED]
    assert [one.delay_s for one in found[:3]] == [2.0, 4.0, 8.0]
    assert "restart 2 of 3 in 4 s" in found[1].message
    assert "/failure/infrastructure_restarts is 3" in found[3].message and "so it was" in found[3].message


def test_the_pause_has_a_bound() -> None:
    assert following(*[(Reason.WORKER_LOST, 0)] * 9, infrastructure_restarts=99).delay_s == 10.0
    assert following(*[(Reason.WORKER_LOST, 0)] * 2000, infrastructure_restarts=9999).delay_s == 10.0


def test_user_errors_are_not_tried_again_and_have_a_budget_of_their_own() -> None:
    assert following((Reason.USER_ERROR, 5)).state is JobState.FAILED
    assert following((Reason.USER_ERROR, 5), user_error_restarts=1).state is JobState.RESTARTING
    mixed = [(Reason.WORKER_LOST, 5)] * 3
    assert following(*mixed, (Reason.USER_ERROR, 5), user_error_restarts=1).state is JobState.RESTARTING
    assert following(*mixed, (Reason.USER_ERROR, 5), (Reason.WORKER_LOST, 5)).state is JobState.FAILED


def test_progress_gives_the_budget_back() -> None:
    lost = (Reason.WORKER_LOST, 5)
    found = following(lost, lost, lost, (Reason.WORKER_LOST, 100), lost)
    assert (found.state, found.used) == (JobState.RESTARTING, 2)
    assert following(lost, lost, lost, (Reason.WORKER_LOST, 99)).state is JobState.FAILED


def test_pauses_and_preemptions_cost_nothing() -> None:
    past = [(Reason.WORKER_LOST, 5), (Reason.PAUSED, 5), (Reason.PREEMPTED, 5), (Reason.WORKER_LOST, 5)]
    assert following(*past).used == 2


def test_a_stall_ends_the_job_where_the_watchdog_says_so() -> None:
    spec = make_spec(watchdog={"action": "fail"})
    past = [Past(reason=Reason.STALLED, steps=1)]
    assert decide_next(End(reason=Reason.STALLED, message="rank 1"), past, spec).state is JobState.FAILED


def claim(number: int, priority: int, workers: int = 2, *, preemptible: bool = True) -> Claim:
    return Claim(
        job_id=f"j{number}", number=number, priority=priority, preemptible=preemptible, worker=Resources(cpus=1.0),
        workers=workers,
    )  # fmt: skip


def victims(first: Claim, running: list[Claim], free: float) -> list[str]:
    return [job.job_id for job in decide_victims(first, running, Resources(cpus=free))]


def test_the_lowest_and_youngest_give_way() -> None:
    running = [claim(1, 0), claim(2, 0), claim(3, 5)]
    assert victims(claim(9, 10), running, 0) == ["j2"]
    assert victims(claim(9, 10, 4), running, 0) == ["j2", "j1"]
    assert victims(claim(9, 10, 6), running, 0) == ["j2", "j1", "j3"]


def test_nobody_gives_way_in_vain() -> None:
    assert victims(claim(9, 10), [claim(1, 0)], 2) == [], "there is room"
    assert victims(claim(9, 10, 4), [claim(1, 0)], 1) == [], "it would not be enough"
    assert victims(claim(9, 10), [claim(1, 10), claim(2, 11)], 0) == [], "none is lower"
    assert victims(claim(9, 10), [claim(1, 0, preemptible=False)], 0) == []
    assert victims(claim(9, 10, 4), [claim(1, 0, 1), claim(2, 1, 4)], 0) == ["j2"], "the small one may stay"
