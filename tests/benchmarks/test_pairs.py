"""The estimator of what one variant costs over another: it shows one per cent under drift and tails, and no more."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.pairs import excess


def samples(rounds: int, cost: float, seed: int) -> tuple[list[float], list[float]]:
    """Pairs of steps on a machine that drifts by a third, with noise of 2 % and now and then a spell of half a step."""
    dice = random.Random(seed)
    levels = [0.3 * (1 + 0.3 * math.sin(number / 40)) for number in range(rounds)]

    def step(level: float) -> float:
        return level * (1 + dice.gauss(0, 0.02) + (0.5 if dice.random() < 0.05 else 0.0))

    return [(1 + cost) * step(level) for level in levels], [step(level) for level in levels]


def test_one_per_cent_is_shown_and_nothing_is_not() -> None:
    there = [excess(*samples(200, 0.01, seed), resamples=400) for seed in range(20)]
    nothing = [excess(*samples(200, 0.0, seed), resamples=400) for seed in range(20, 40)]
    assert sum(found.low <= 0.01 <= found.high for found in there) >= 17, "an interval of 95 %"
    assert sum(found.low <= 0.0 <= found.high for found in nothing) >= 17
    assert sum(found.low > 0.0 for found in there) >= 17, "and narrow enough to tell one per cent from nothing"
    assert all(found.low <= found.median <= found.high for found in there + nothing)


def test_the_interval_is_that_of_the_samples_and_says_its_needs() -> None:
    variant, base = samples(50, 0.01, 1)
    assert excess(variant, base, resamples=200) == excess(variant, base, resamples=200)
    assert excess([2.0] * 5, [1.0] * 5, resamples=50) == excess([4.0] * 5, [2.0] * 5, resamples=50)
    with pytest.raises(ValueError, match="found 1"):
        excess([1.0], [1.0])
    with pytest.raises(ValueError):
        excess([1.0, 2.0], [1.0])
