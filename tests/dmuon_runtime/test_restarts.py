"""The search for restarts: what its model says of known sets, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmuon_runtime.coefficients import (
    KELLER_JORDAN_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    CoefficientError,
    Triple,
    coefficients_for,
)
from dmuon_runtime.newton_schulz import default_restarts
from dmuon_runtime.restarts import restart_error, search_restarts


@pytest.mark.parametrize("short_dim", [64, 384, 1024, 4096])
def test_the_search_agrees_with_the_default(short_dim: int) -> None:
    choice = search_restarts(POLAR_EXPRESS_COEFFICIENTS, short_dim=short_dim)
    assert choice.restarts == default_restarts(5) == (2,)
    assert choice.error < 0.11


@pytest.mark.parametrize("coefficients", [YOU_COEFFICIENTS, KELLER_JORDAN_COEFFICIENTS])
def test_other_sets_of_five_lift_less_and_may_start_anew_at_three(coefficients: tuple[Triple, ...]) -> None:
    assert search_restarts(coefficients).restarts == (3,)


@pytest.mark.parametrize("steps", [6, 7, 8, 10])
def test_longer_sets_stay_exact_with_the_default(steps: int) -> None:
    """With one restart the segments become so long that the result is lost."""
    coefficients = coefficients_for(POLAR_EXPRESS_COEFFICIENTS, steps)
    assert restart_error(coefficients, default_restarts(steps)) < 0.01
    assert restart_error(coefficients, (2,)) > 0.4


def test_candidates_are_all_there_and_best_first() -> None:
    choice = search_restarts(POLAR_EXPRESS_COEFFICIENTS, num_restarts=2)
    errors = [error for _, error in choice.candidates]
    assert len(errors) == 6 and errors == sorted(errors)
    assert choice.candidates[0] == (choice.restarts, choice.error)
    assert choice.error < search_restarts(POLAR_EXPRESS_COEFFICIENTS).error, "another restart helps"


def test_no_restart_is_worst_and_a_wider_mantissa_is_better() -> None:
    none, one = (search_restarts(POLAR_EXPRESS_COEFFICIENTS, number) for number in (0, 1))
    assert none.restarts == () and none.error > 20 * one.error
    by_dtype = [search_restarts(YOU_COEFFICIENTS, dtype=dtype).error for dtype in (torch.bfloat16, torch.float16)]
    assert by_dtype[0] > 5 * by_dtype[1]
    assert search_restarts(YOU_COEFFICIENTS, dtype=torch.float32).error < 1e-4


def test_a_small_matrix_rounds_more_at_the_start() -> None:
    """The first segment's error falls with the square root of the side."""
    small, large = (restart_error(POLAR_EXPRESS_COEFFICIENTS, (3,), short_dim=n) for n in (64, 4096))
    assert small > 5 * large


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="5 restarts do not fit: 5 steps have 4 places"):
        search_restarts(POLAR_EXPRESS_COEFFICIENTS, 5)
    with pytest.raises(ValueError, match="must be floating"):
        search_restarts(POLAR_EXPRESS_COEFFICIENTS, dtype=torch.int8)
    with pytest.raises(ValueError, match="short_dim"):
        search_restarts(POLAR_EXPRESS_COEFFICIENTS, short_dim=0)
    with pytest.raises(ValueError, match="too many to try"):
        search_restarts([(1.5, -0.5, 0.0)] * 40, 10)
    with pytest.raises(CoefficientError):
        search_restarts([(1.0, 2.0)])
    odd: list[dict[str, Any]] = [{"num_restarts": 1.5}, {"num_restarts": "1"}, {"short_dim": 4.0}, {"dtype": "f2"}]
    for words in odd:
        ((name, value),) = words.items()
        with pytest.raises(ValueError, match=f"{name} must be a .*found {value!r}"):
            search_restarts(POLAR_EXPRESS_COEFFICIENTS, **words)
