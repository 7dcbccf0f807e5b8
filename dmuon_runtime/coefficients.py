"""Coefficients of the Newton-Schulz iteration ``x -> a x + b x^3 + c x^5``: published sets and a recurrence.

A set is a tuple of triples ``(a, b, c)``, one a step. Inputs are singular values of a matrix divided by its Frobenius
norm, so they lie in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import SupportsFloat, cast

import torch

__all__ = [
    "KELLER_JORDAN_COEFFICIENTS", "POLAR_EXPRESS_COEFFICIENTS", "YOU_COEFFICIENTS", "CoefficientError", "Triple",
    "apply_polynomials", "coefficients_for", "polar_express", "validate_coefficients",
]  # fmt: skip

Triple = tuple[float, float, float]

SAFETY = 1.05
"""Every Polar Express polynomial is evaluated at ``x / SAFETY``: unscaled, it diverges for inputs above 1.005, which
rounding in half precision reaches."""
LOWER_BOUND = 1e-3
"""Smallest singular value that the default set brings close to 1."""
CUSHION = 0.02407327424182761
"""A step never fits below this share of its upper end, lest its first coefficient grow without use."""
DIVERGED = 10.0

POLAR_EXPRESS_COEFFICIENTS: tuple[Triple, ...] = (
    (7.892582874424408, -20.38301394587957, 13.555306149406924),
    (3.911484868135431, -2.5464635929060884, 0.4268988319673074),
    (3.760657955697423, -2.512819018216563, 0.4323647349070073),
    (3.160399673686287, -2.149649518898498, 0.3996366907664389),
    (2.1910971618617303, -1.441662010214663, 0.328146487623155),
)
"""Amsel et al., arXiv 2505.16932, with :data:`SAFETY` on all five steps. The default."""

YOU_COEFFICIENTS: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""YouJiacheng's set: tighter than Polar Express above 3e-3, weaker below."""

KELLER_JORDAN_COEFFICIENTS: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),) * 5
"""The constant set of the first Muon (Jordan et al., 2024)."""


class CoefficientError(ValueError):
    """A coefficient set that cannot be used."""

    code = "bad_coefficients"


def validate_coefficients(coefficients: Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    """Return the set as tuples of floats.

    Raises:
        CoefficientError: empty, not triples, not finite, or an input of (0, 1] whose iterates diverge.
    """
    entries = _listed(coefficients)
    if not entries:
        raise CoefficientError(
            f"a coefficient set needs at least one triple (a, b, c), found {coefficients!r}; give one a step"
        )
    triples: list[Triple] = []
    for index, entry in enumerate(entries):
        numbers = _listed(entry)
        values = [float(number) for number in numbers if isinstance(number, SupportsFloat)]
        if not len(numbers) == len(values) == 3 or not all(map(math.isfinite, values)):
            raise CoefficientError(
                f"coefficients[{index}] must be three finite numbers (a, b, c), found {entry!r}; give one triple a step"
            )
        triples.append((values[0], values[1], values[2]))
    _refuse_divergence(tuple(triples))
    return tuple(triples)


def _listed(values: object) -> list[object]:
    """What ``values`` holds, in order; nothing where it is a text or no collection."""
    if isinstance(values, str):
        return []
    try:
        return list(cast("Iterable[object]", values))
    except TypeError:
        return []


def apply_polynomials(values: torch.Tensor, coefficients: Sequence[Triple]) -> torch.Tensor:
    """Return ``p_T(...p_1(x))`` element by element, in the dtype of ``values``."""
    for a, b, c in coefficients:
        square = values * values
        values = values * (a + square * (b + square * c))
    return values


def _refuse_divergence(coefficients: tuple[Triple, ...]) -> None:
    inputs = torch.cat([torch.logspace(-8, 0, 4001, dtype=torch.float64), torch.linspace(0.01, 1, 4001).double()])
    values = inputs
    for step, triple in enumerate(coefficients):
        values = apply_polynomials(values, (triple,))
        bad = ~(values.abs() <= DIVERGED)
        if bool(bad.any()):
            where = float(inputs[bad].min())
            raise CoefficientError(
                f"the coefficients diverge: the input {where:.6g} grows beyond {DIVERGED:g} at step {step}; inputs lie "
                "in (0, 1]. Divide a, b, c by s, s^3, s^5 with a safety factor s such as 1.05, or check the signs."
            )


def coefficients_for(coefficients: tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    """Return exactly ``steps`` triples.

    Polar Express is solved anew for another number of steps; any other set is cut, or its last triple repeated.

    Raises:
        CoefficientError: the repeated triple makes the set diverge.
    """
    if len(coefficients) == steps:
        return coefficients
    if coefficients == POLAR_EXPRESS_COEFFICIENTS:
        return polar_express(steps)
    return _fitted(coefficients, steps)


@lru_cache(maxsize=64)
def _fitted(coefficients: tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    fitted = coefficients[:steps] + coefficients[-1:] * (steps - len(coefficients))
    if steps > len(coefficients):
        _refuse_divergence(fitted)
    return fitted


@lru_cache(maxsize=64)
def polar_express(steps: int) -> tuple[Triple, ...]:
    """Return the Polar Express set for ``steps`` steps, :data:`SAFETY` included.

    Five steps or more start from :data:`LOWER_BOUND`. The recurrence is greedy, so a shorter set of the same bound
    would be the same list cut, far from 1 at its end. Fewer steps therefore give up small singular values: the lower
    bound is raised until the last interval is as tight as that of the five steps.
    """
    if steps < 1:
        raise CoefficientError(f"Polar Express needs at least 1 step, found {steps}")
    lower = LOWER_BOUND
    if steps < 5:
        wanted = _recurrence(5, LOWER_BOUND)[1]
        low, high = math.log(LOWER_BOUND), 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if _recurrence(steps, math.exp(middle))[1] >= wanted else (middle, high)
        lower = math.exp(high)
    triples, _ = _recurrence(steps, lower)
    return tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in triples)


def _recurrence(steps: int, lower: float) -> tuple[list[Triple], float]:
    """Return the unscaled triples and the lower end of the last interval, whose upper end is 2 minus it."""
    upper, triples = 1.0, []
    for _ in range(steps):
        a, b, c = _minimax_quintic(max(lower, CUSHION * upper), upper)
        ends = sum(a * x + b * x**3 + c * x**5 for x in (lower, upper))
        a, b, c = 2 * a / ends, 2 * b / ends, 2 * c / ends  # errors at both ends equal and opposite
        triples.append((a, b, c))
        lower = a * lower + b * lower**3 + c * lower**5
        upper = 2 - lower
    return triples, lower


def _minimax_quintic(lower: float, upper: float) -> Triple:
    """Best approximation of 1 on [lower, upper] by an odd quintic, by Remez exchange.

    Where the interval is too short to resolve, the limit: the quintic with value 1 and two zero derivatives at its
    middle.
    """
    if upper - lower < 1e-5 * upper:
        middle = (lower + upper) / 2
        return (15 / 8 / middle, -10 / 8 / middle**3, 3 / 8 / middle**5)
    inner = [lower + (upper - lower) * share for share in (0.25, 0.75)]
    a = b = c = 0.0
    for _ in range(100):
        nodes = torch.tensor([lower, *inner, upper], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([nodes, nodes**3, nodes**5, signs], dim=1)
        a, b, c, _ = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))  # p' is a quadratic in x^2
        fresh = [math.sqrt((-3 * b - sign * root) / (10 * c)) for sign in (1.0, -1.0)]
        moved = max(abs(new - old) for new, old in zip(fresh, inner, strict=True))
        inner = fresh
        if moved < 1e-15 * upper:
            break
    return (a, b, c)
