"""Where the Gram form should start anew, for any coefficients: searched under a stated model of rounding errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_runtime.coefficients import Triple, apply_polynomials, validate_coefficients

__all__ = ["RestartChoice", "default_restarts", "restart_error", "search_restarts"]

DECADES = 3.0
"""Spread of the model's singular values: the range that the default coefficients are made for."""
MAX_CANDIDATES = 20_000


def default_restarts(steps: int) -> tuple[int, ...]:
    """Return the steps before which the Gram form starts anew: 3, then every second one.

    The published default is 2. At 3 the FLOPs are the same, and emulated float16 brings the error back to that of the
    direct form, up to 7 times smaller than at 2 (docs/adr/0005): before the first restart the Gram matrix has norm 1 at
    most and tolerates three steps, after it its singular values are near 1 and tolerate two.
    """
    return tuple(range(3, steps, 2))


@dataclass(frozen=True, slots=True)
class RestartChoice:
    """Outcome of a search.

    Attributes:
        restarts: Steps (0-based) before which to start anew.
        error: Modelled relative Frobenius error with them.
        candidates: All that were tried with their errors, best first.
    """

    restarts: tuple[int, ...]
    error: float
    candidates: tuple[tuple[tuple[int, ...], float], ...]


def search_restarts(
    coefficients: Sequence[Sequence[float]],
    num_restarts: int = 1,
    dtype: torch.dtype = torch.float16,
    short_dim: int = 1024,
) -> RestartChoice:
    """Return the ``num_restarts`` restarts with the smallest modelled error.

    The model. A segment begins with ``R = X X^T`` of singular values x; rounding moves each eigenvalue ``x^2`` by at
    most delta. Let u be the unit roundoff of ``dtype``. At the start X has Frobenius norm 1, so an element of R is near
    ``1 / sqrt(n)`` of what it becomes after a restart, when all x are near 1: ``delta = 2 u / sqrt(n)`` in the first
    segment and ``2 u`` in each later one (fitted to float16 and bfloat16 emulated on a CPU, n from 384 to 1536; the
    search published with gram-newton-schulz takes 4e-4 for both, and so prefers a restart that is one step too early).
    The error is that of ``Q X`` against the exact polynomial, over n singular values spread evenly in log scale over
    three decades, for the worse sign of delta. It bounds the measured error from above, by up to an order of magnitude,
    and ranks one restart against another as ``benchmarks/ns_accuracy.py`` does. It says nothing about matrices of
    effective rank near 1, for which an earlier restart can be better.

    Args:
        coefficients: triples (a, b, c), one a step.
        num_restarts: how many; each costs one more product with the long side and three fewer with the short one.
        dtype: of the products' operands.
        short_dim: n, the short side of the matrices.

    Raises:
        CoefficientError: unusable coefficients.
        ValueError: a number of restarts that does not fit between the steps, a dtype that is not floating, or too many
            combinations to try.
    """
    triples = validate_coefficients(coefficients)
    num_places = len(triples) - 1
    if not 0 <= num_restarts <= num_places:
        raise ValueError(f"{num_restarts} restarts do not fit: {len(triples)} steps have {num_places} places for them")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating, found {dtype}")
    if short_dim < 1:
        raise ValueError(f"short_dim must be at least 1, found {short_dim}")
    if math.comb(num_places, num_restarts) > MAX_CANDIDATES:
        raise ValueError(
            f"{math.comb(num_places, num_restarts)} ways to place {num_restarts} restarts in {len(triples)} steps are "
            f"too many to try (limit {MAX_CANDIDATES}); take fewer restarts"
        )
    places = itertools.combinations(range(1, len(triples)), num_restarts)
    errors = [(restarts, restart_error(triples, restarts, dtype, short_dim)) for restarts in places]
    errors.sort(key=lambda entry: (entry[1] if math.isfinite(entry[1]) else math.inf, entry[0]))
    return RestartChoice(errors[0][0], errors[0][1], tuple(errors))


def restart_error(
    coefficients: Sequence[Triple], restarts: Sequence[int], dtype: torch.dtype = torch.float16, short_dim: int = 1024
) -> float:
    """Return the modelled relative Frobenius error of the Gram form; the model is in :func:`search_restarts`."""
    roundoff = torch.finfo(dtype).eps / 2
    x = torch.logspace(-DECADES, 0, short_dim, dtype=torch.float64)
    x = x / torch.linalg.vector_norm(x)
    exact = apply_polynomials(x, coefficients)
    scale = torch.linalg.vector_norm(exact)
    errors = [
        float(torch.linalg.vector_norm(_rounded(x, coefficients, restarts, sign * roundoff) - exact) / scale)
        for sign in (-1.0, 1.0)
    ]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _rounded(x: Tensor, coefficients: Sequence[Triple], restarts: Sequence[int], roundoff: float) -> Tensor:
    """Singular values after the Gram form, each segment's Gram matrix moved by its delta."""
    q, r = torch.ones_like(x), x * x + 2 * roundoff / math.sqrt(x.numel())
    for step, (a, b, c) in enumerate(coefficients):
        if step in restarts:
            x, q = q * x, torch.ones_like(x)
            r = x * x + 2 * roundoff
        h = a + r * (b + r * c)
        q, r = q * h, r * h * h
    return q * x
