"""The transition table, whole."""

from __future__ import annotations

import itertools

import pytest

from worker.contract.states import TRANSITIONS, IllegalTransition, JobState, Reason, check_transition


@pytest.mark.parametrize(("old", "new"), list(itertools.product(JobState, JobState)))
def test_table_is_the_law(old: JobState, new: JobState) -> None:
    if new in TRANSITIONS[old]:
        check_transition(old, new)
    else:
        with pytest.raises(IllegalTransition, match=old):
            check_transition(old, new)


def test_terminal_states_have_no_way_out_and_all_others_reach_an_end() -> None:
    for state in JobState:
        assert state.terminal == (not TRANSITIONS[state])
        reached, front = {state}, [state]
        while front:
            front = [new for old in front for new in TRANSITIONS[old] if new not in reached]
            reached.update(front)
        assert any(other.terminal for other in reached)


def test_a_running_job_ends_only_through_stopping() -> None:
    """Terminal means verified gone, so nothing with live processes may jump there."""
    ends = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    for state in (JobState.STARTING, JobState.RUNNING):
        assert not TRANSITIONS[state] & ends


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_blame_and_end(reason: Reason) -> None:
    assert reason.blame
    waits = reason in (Reason.PAUSED, Reason.PREEMPTED)
    assert reason.end_state.terminal is not waits
