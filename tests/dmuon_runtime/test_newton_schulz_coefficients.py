"""The coefficient sets: where they come from, what band they reach, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dmuon_runtime.coefficients import (
    KELLER_JORDAN_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    SAFETY,
    YOU_COEFFICIENTS,
    CoefficientError,
    Triple,
    apply_polynomials,
    coefficients_for,
    polar_express,
    validate_coefficients,
)

INPUTS = torch.logspace(-5, 0, 20_001, dtype=torch.float64)


def test_the_recurrence_reproduces_the_published_set() -> None:
    for found, published in zip(polar_express(5), POLAR_EXPRESS_COEFFICIENTS, strict=True):
        assert found == pytest.approx(published, rel=1e-11)


def test_further_steps_are_the_published_ones() -> None:
    unscaled = [(a * SAFETY, b * SAFETY**3, c * SAFETY**5) for a, b, c in polar_express(8)]
    assert unscaled[5] == pytest.approx((1.891301407787398, -1.2679958271945868, 0.37680408948524835), rel=1e-8)
    assert unscaled[6] == pytest.approx((1.8750014808534479, -1.2500016453999487, 0.3750001645474248), rel=1e-8)
    assert unscaled[7] == pytest.approx((15 / 8, -10 / 8, 3 / 8), rel=1e-8)


@pytest.mark.parametrize(
    ("coefficients", "start", "low", "high"),
    [
        (POLAR_EXPRESS_COEFFICIENTS, 1e-3, 0.729, 1.124),
        (POLAR_EXPRESS_COEFFICIENTS, 3e-3, 0.846, 1.124),
        (POLAR_EXPRESS_COEFFICIENTS, 1e-2, 0.846, 1.124),
        (YOU_COEFFICIENTS, 1e-3, 0.475, 1.145),
        (YOU_COEFFICIENTS, 3e-3, 0.978, 1.145),
        (YOU_COEFFICIENTS, 1e-2, 0.978, 1.032),
        (KELLER_JORDAN_COEFFICIENTS, 1e-3, 0.471, 1.202),
        (KELLER_JORDAN_COEFFICIENTS, 3e-3, 0.682, 1.202),
        (KELLER_JORDAN_COEFFICIENTS, 1e-2, 0.682, 1.134),
    ],
)
def test_each_set_reaches_its_band(coefficients: tuple[Triple, ...], start: float, low: float, high: float) -> None:
    reached = apply_polynomials(INPUTS, coefficients)[start <= INPUTS]
    assert float(reached.min()) == pytest.approx(low, abs=1e-3)
    assert float(reached.max()) == pytest.approx(high, abs=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_fewer_steps_give_up_small_values_and_keep_the_band(steps: int) -> None:
    lifted = apply_polynomials(INPUTS, polar_express(steps))
    assert len(polar_express(steps)) == steps
    assert float(lifted.max()) == pytest.approx(1.1236, abs=1e-3)
    share = {1: 0.27, 2: 0.072, 3: 0.0182, 4: 0.0046}[steps]
    assert float(lifted[share < INPUTS].min()) > 0.8
    cut = apply_polynomials(INPUTS, POLAR_EXPRESS_COEFFICIENTS[:steps])
    assert float(cut[share < INPUTS].min()) < 0.5, "a cut list would not do"


def test_more_steps_tighten_the_band() -> None:
    reached = apply_polynomials(INPUTS, polar_express(8))[INPUTS >= 1e-3]
    assert float((reached - 1).abs().max()) < 5e-4


def test_other_sets_are_cut_or_repeat_their_last_triple() -> None:
    assert coefficients_for(YOU_COEFFICIENTS, 2) == YOU_COEFFICIENTS[:2]
    assert coefficients_for(YOU_COEFFICIENTS, 7) == (*YOU_COEFFICIENTS, YOU_COEFFICIENTS[-1], YOU_COEFFICIENTS[-1])


def test_divergent_sets_are_refused_with_the_input() -> None:
    wrong_power = [(7.893, -20.381, 14.939), (3.912, -2.544, 0.470), (3.761, -2.512, 0.476), (3.160, -2.148, 0.440)]
    with pytest.raises(CoefficientError, match=r"the input 0\.9\d+ grows beyond 10 at step 1"):
        validate_coefficients(wrong_power)


def test_a_repeated_triple_is_checked_too() -> None:
    assert coefficients_for(validate_coefficients([(3.0, 3.0, 3.0)]), 1) == ((3.0, 3.0, 3.0),)
    with pytest.raises(CoefficientError, match="diverge"):
        coefficients_for(((3.0, 3.0, 3.0),), 5)


@pytest.mark.parametrize("bad", [[], [(1.0, 2.0)], [(1.0, float("nan"), 0.0)]])
def test_malformed_sets_are_refused(bad: list[tuple[float, ...]]) -> None:
    with pytest.raises(CoefficientError):
        validate_coefficients(bad)
