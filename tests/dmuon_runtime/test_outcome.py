"""What a step did, asked for at once or sent before."""

from __future__ import annotations

import pytest
import torch

from dmuon_runtime.outcome import StepOutcome, UpdateTotals


def outcome(*flags: float, norm: float | None = 2.5) -> StepOutcome:
    found = StepOutcome(
        torch.tensor(flags), [f"p{i}" for i in range(len(flags))], None if norm is None else torch.tensor(norm)
    )
    moved, empty = UpdateTotals(), UpdateTotals()
    moved.add([torch.full((2, 3), 2.0), torch.ones(4)], scale=0.5)
    moved.add_squares([torch.tensor([1.0, 2.0]), torch.tensor(4.0)], elements=7)
    found.updates_by_route = {"muon": moved, "adamw": empty}
    return found


@pytest.mark.parametrize("sent", [False, True])
def test_what_was_sent_is_what_is_asked_for(sent: bool) -> None:
    found, without = outcome(0, 0, 0), outcome(0, norm=None)
    for each in (found, without):
        if sent:
            each.send()
            sums = each._sent
            each.send()
            assert each._sent is sums, "once"
        assert each.updates == {"muon": (pytest.approx(6 + 1 + 7), 17), "adamw": (0.0, 0)}
        assert not each.skipped and each.offenders == ()
    assert found.grad_norm == 2.5 and without.grad_norm is None


@pytest.mark.parametrize("sent", [False, True])
def test_offenders_are_named(sent: bool, caplog: pytest.LogCaptureFixture) -> None:
    found = outcome(0, 1, 0, 2)
    if sent:
        found.send()
    assert found.skipped and found.offenders == ("p1", "p3")
    assert "infinite or NaN gradient of p1, p3" in caplog.text
