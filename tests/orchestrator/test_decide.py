"""Decisions, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.reconcile.decide import (
    AttemptAction,
    AttemptView,
    End,
    decide_attempt,
    decide_end,
)
from orchestrator.reconcile.verify import decide_routes_verified
from tests.orchestrator.fakes import FORWARD, MATRICES, REDUCE, make_plan, make_report, make_spec
from worker.contract.states import JobState, Reason

COMPLETED = End(reason=Reason.COMPLETED, message="")
CANCELLED = End(reason=Reason.CANCELLED, message="")
FAILED = End(reason=Reason.USER_ERROR, message="boom")


def view(state: JobState, **changes: Any) -> AttemptView:
    values: dict[str, Any] = {
        "state": state, "now": 100.0, "deadline_at": 200.0, "formed": False, "intended": None, "reported": None,
    }  # fmt: skip
    return AttemptView(**values | changes)


@pytest.mark.parametrize(
    ("seen", "action", "reason"),
    [
        (view(JobState.STARTING), AttemptAction.NOTHING, None),
        (view(JobState.STARTING, formed=True), AttemptAction.RUN, None),
        (view(JobState.STARTING, deadline_at=99.0), AttemptAction.STOP, Reason.SETUP_FAILED),
        (view(JobState.STARTING, deadline_at=99.0, formed=True), AttemptAction.RUN, None),
        (view(JobState.STARTING, gone=True, formed=True), AttemptAction.STOP, Reason.WORKER_LOST),
        (view(JobState.RUNNING, formed=True, deadline_at=99.0), AttemptAction.NOTHING, None),
        (view(JobState.RUNNING, reported=COMPLETED), AttemptAction.STOP, Reason.COMPLETED),
        (view(JobState.RUNNING, gone=True), AttemptAction.STOP, Reason.WORKER_LOST),
        (view(JobState.STOPPING, intended=CANCELLED), AttemptAction.SEND_STOP, Reason.CANCELLED),
        (view(JobState.STOPPING, intended=CANCELLED, stop_sent_at=99.0), AttemptAction.NOTHING, Reason.CANCELLED),
        (view(JobState.STOPPING, intended=CANCELLED, stop_sent_at=90.0), AttemptAction.SEND_STOP, Reason.CANCELLED),
        (view(JobState.STOPPING, intended=CANCELLED, reported=FAILED), AttemptAction.FINISH, Reason.CANCELLED),
        (view(JobState.STOPPING, intended=FAILED, gone=True), AttemptAction.FINISH, Reason.USER_ERROR),
        (view(JobState.STOPPING, intended=FAILED, gone=True, remains=("x",)), AttemptAction.NOTHING, Reason.USER_ERROR),
    ],
)
def test_attempts(seen: AttemptView, action: AttemptAction, reason: Reason | None) -> None:
    found, end = decide_attempt(seen)
    assert found is action
    assert (None if end is None else end.reason) == reason


def test_what_was_completed_stays_completed() -> None:
    assert decide_end(CANCELLED, COMPLETED) is COMPLETED
    assert decide_end(CANCELLED, FAILED) is CANCELLED
    assert decide_end(None, FAILED) is FAILED


PLAN = make_plan(make_spec())


def test_verification_needs_every_rank_at_one_step() -> None:
    assert decide_routes_verified(PLAN, [make_report(0, 1)]) is None
    assert decide_routes_verified(PLAN, [make_report(0, 1), make_report(1, 2)]) is None
    assert decide_routes_verified(PLAN, []) is None


def test_verification_counts_skipped_steps() -> None:
    verdict = decide_routes_verified(PLAN, [make_report(rank, 5, skipped=2) for rank in (0, 1)])
    assert verdict is not None and verdict.verified
    assert (verdict.matrices, verdict.planned_matrices) == (3 * MATRICES, 3 * MATRICES)
    assert verdict.payload_bytes == verdict.planned_bytes == 2 * 5 * (FORWARD + REDUCE)


def test_verification_counts_from_where_the_attempt_began() -> None:
    """Totals are the attempt's own: five steps that were done before it resumed are not planned for it."""
    reports = [make_report(rank, 3).model_copy(update={"step": 8, "first_step": 5}) for rank in (0, 1)]
    verdict = decide_routes_verified(PLAN, reports)
    assert verdict is not None and verdict.verified and verdict.step == 8
    assert verdict.planned_matrices == 3 * MATRICES
    reports[1] = reports[1].model_copy(update={"first_step": 4})
    verdict = decide_routes_verified(PLAN, reports)
    assert verdict is not None and "do not agree on the step at which the attempt began" in verdict.differences[0]


def test_verification_names_each_difference() -> None:
    plan = PLAN.model_copy(update={"traffic": PLAN.traffic[:1]})
    verdict = decide_routes_verified(plan, [make_report(0, 1, matrices=MATRICES + 1), make_report(1, 1)])
    assert verdict is not None and not verdict.verified
    assert verdict.differences == (
        f"{MATRICES + 1} matrices orthogonalised, {MATRICES} planned (rank 0 {MATRICES + 1} instead of {MATRICES})",
        f"muon/reduce: {2 * REDUCE} bytes counted, 0 planned",
    )


@pytest.mark.parametrize("change", [-1, 1])
def test_one_byte_less_or_more_is_a_difference(change: int) -> None:
    reports = [make_report(0, 4), make_report(1, 4)]
    first, *others = reports[1].comm
    moved = first.model_copy(update={"payload_bytes": first.payload_bytes + change})
    reports[1] = reports[1].model_copy(update={"comm": (moved, *others)})
    verdict = decide_routes_verified(PLAN, reports)
    assert verdict is not None and not verdict.verified
    assert verdict.differences == (f"muon/forward: {8 * FORWARD + change} bytes counted, {8 * FORWARD} planned",)
    missing = [report.model_copy(update={"comm": report.comm[:1]}) for report in (make_report(0, 4), make_report(1, 4))]
    verdict = decide_routes_verified(PLAN, missing)
    assert verdict is not None and verdict.differences == (f"muon/reduce: 0 bytes counted, {8 * REDUCE} planned",)


def test_verification_names_what_a_rank_launched_and_nobody_chose() -> None:
    said = "step 3 launched cublas where quack was chosen"
    reports = [make_report(0, 5), make_report(1, 5).model_copy(update={"offenders": (said,)})]
    verdict = decide_routes_verified(PLAN, reports)
    assert verdict is not None and not verdict.verified
    assert verdict.differences == (f"rank 1: {said}",)


def test_verification_counts_skipped_steps_that_a_device_computed_all_the_same() -> None:
    """On a GPU a skipped step orthogonalises and publishes like any other, and the device withholds the update."""
    publish = PLAN.traffic[0].model_copy(update={"phase": "publish"})
    plan = PLAN.model_copy(update={"traffic": (*PLAN.traffic, publish)})
    ran = make_report(0, 5).comm[0].model_copy(update={"phase": "publish"})
    reports = [make_report(rank, 5, skipped=2, matrices=5 * MATRICES) for rank in (0, 1)]
    reports = [each.model_copy(update={"comm": (*each.comm, ran), "withheld_total": 2}) for each in reports]
    verdict = decide_routes_verified(plan, reports)
    assert verdict is not None and verdict.verified, verdict
    verdict = decide_routes_verified(plan, [each.model_copy(update={"withheld_total": 0}) for each in reports])
    assert verdict is not None and not verdict.verified, "had they been left out, that would be too much"


def test_verification_sees_errors_of_two_ranks_that_cancel() -> None:
    spare = make_report(0, 1, matrices=1).ns
    reports = [make_report(0, 1, matrices=MATRICES - 1), make_report(1, 1).model_copy(update={"ns": spare})]
    verdict = decide_routes_verified(PLAN, reports)
    assert verdict is not None and verdict.matrices == verdict.planned_matrices
    assert f"rank 0 {MATRICES - 1} instead of {MATRICES}, rank 1 1 instead of 0" in verdict.differences[0]
