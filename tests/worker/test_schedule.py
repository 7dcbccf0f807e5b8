"""Rates are a pure function of (spec, step)."""

from __future__ import annotations

import pytest

from worker.contract.spec import ScheduleSpec
from worker.schedule import lr_ratio


def ratios(schedule: ScheduleSpec, steps: int) -> list[float]:
    return [lr_ratio(schedule, steps, step) for step in range(steps)]


def test_warm_up_then_constant() -> None:
    assert ratios(ScheduleSpec(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_its_final_ratio_in_the_last_step() -> None:
    schedule = ScheduleSpec(kind="linear", warmup_steps=1, final_ratio=0.2)
    assert ratios(schedule, 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine() -> None:
    assert ratios(ScheduleSpec(kind="cosine", final_ratio=0.1), 2) == pytest.approx([0.55, 0.1])


def test_all_warm_up() -> None:
    assert ratios(ScheduleSpec(kind="cosine", warmup_steps=2), 2) == [0.5, 1.0]
