"""What one variant costs over another, from samples taken side by side: an estimate with its confidence interval.

Times of a shared machine drift and have long tails, so two medians over a whole run differ by more than one per cent
of equal work. Samples of one round stand next to each other: the drift is the same in all of them and leaves their
ratio; the median of the ratios minds no tail; the bootstrap over rounds (Efron, 1979; percentiles) says how far off
that median can be.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Excess", "excess"]


@dataclass(frozen=True, slots=True)
class Excess:
    """How much more than the base a variant takes, as a share of the base; ``low`` to ``high`` is the interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.2%} [{self.low:+.2%}, {self.high:+.2%}]"


def excess(
    variant: Sequence[float], base: Sequence[float], *, confidence: float = 0.95, resamples: int = 4000, seed: int = 0
) -> Excess:
    """Return the median over rounds of ``variant / base - 1``, and its bootstrap interval.

    Args:
        variant: a positive figure by round.
        base: of the same rounds.
        confidence: of the interval, between 0 and 1.
        resamples: rounds are drawn anew, with repetition, this often.
        seed: of the drawing; the same samples give the same interval.

    Raises:
        ValueError: fewer than two rounds, or not as many of one as of the other.
    """
    ratios = [mine / its - 1.0 for mine, its in zip(variant, base, strict=True)]
    if len(ratios) < 2:
        raise ValueError(f"an interval needs two rounds at least, found {len(ratios)}")
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    tail = round((1.0 - confidence) / 2.0 * (resamples - 1))
    return Excess(statistics.median(ratios), medians[tail], medians[-1 - tail])
