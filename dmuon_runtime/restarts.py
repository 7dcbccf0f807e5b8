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
"""Spread of the first modelled spectrum: the range that the default coefficients are made for."""
SECOND = 0.06
"""Second singular value of the other modelled spectrum in units of the first, as in a Llama's first gradients."""
SIGNAL = 1e-2
"""Singular values from it on, in units of the largest, count."""
MAX_CANDIDATES = 20_000


def default_restarts(steps: int) -> tuple[int, ...]:
    """Return the steps before which the Gram form starts anew: 2, then every second one, but not before the last.

    Two steps are what the rounding of Q bears where one singular value is far above the others, as in gradients; the
    choice and what it was made from is docs/adr/0005.
    """
    return tuple(range(2, steps - 1, 2))


@dataclass(frozen=True, slots=True)
class RestartChoice:
    """Outcome of a search.

    Attributes:
        restarts: Steps (0-based) before which to start anew.
        error: Modelled relative error of the worst direction with them.
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

    The model. Let u be the unit roundoff of ``dtype``. A segment begins with ``R = X X^T`` of singular values x, and
    rounding moves each eigenvalue ``x^2`` by at most delta. At the start X has Frobenius norm 1, so an element of R is
    near ``1 / sqrt(n)`` of what it becomes after a restart, when all x are near 1: ``delta = 2 u / sqrt(n)`` in the
    first segment and ``2 u`` in each later one. A segment ends with Q, whose elements are as large as its largest
    eigenvalue and are rounded to u of that: every eigenvalue moves by ``u max(Q)``, which is much where one singular
    value is far above the others and needs a small Q. (Fitted to float16 emulated on a CPU, n from 384 to 1536. The
    search published with gram-newton-schulz takes delta to be 4e-4 in all segments and Q to be exact.)

    The error is the largest relative one among singular values within two decades of the largest, for the worse sign of
    the roundings, and the worse of two spectra: n values spread evenly in log scale over three decades, and one value
    over ``0.06 / k``, as first gradients of a Llama have. ``benchmarks/ns_accuracy.py`` measures the same.

    Args:
        coefficients: triples (a, b, c), one a step.
        num_restarts: how many; each costs one more product with the long side and three fewer with the short one.
        dtype: of the products' operands.
        short_dim: n, the short side of the matrices.

    Raises:
        CoefficientError: unusable coefficients.
        ValueError: counts that are no whole numbers, a number of restarts that does not fit between the steps, a dtype
            that is not floating, or too many combinations to try.
    """
    triples = validate_coefficients(coefficients)
    _refuse_types(num_restarts, dtype, short_dim)
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


def _refuse_types(num_restarts: object, dtype: object, short_dim: object) -> None:
    for name, value in (("num_restarts", num_restarts), ("short_dim", short_dim)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be a whole number, found {value!r}")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype such as torch.float16, found {dtype!r}")


def restart_error(
    coefficients: Sequence[Triple], restarts: Sequence[int], dtype: torch.dtype = torch.float16, short_dim: int = 1024
) -> float:
    """Return the modelled relative error of the worst direction; the model is in :func:`search_restarts`."""
    roundoff = torch.finfo(dtype).eps / 2
    errors = []
    for spectrum in _spectra(short_dim):
        x = spectrum / torch.linalg.vector_norm(spectrum)
        exact, counts = apply_polynomials(x, coefficients), x >= SIGNAL * x[0]
        for signed in (-roundoff, roundoff):
            error = ((_rounded(x, coefficients, restarts, signed) - exact).abs() / exact)[counts].max()
            errors.append(float(error.nan_to_num(nan=math.inf)))
    return max(errors)


def _spectra(n: int) -> tuple[Tensor, Tensor]:
    """Singular values [n], largest first."""
    rest = SECOND / torch.arange(1, n, dtype=torch.float64)
    return torch.logspace(0, -DECADES, n, dtype=torch.float64), torch.cat([torch.ones(1, dtype=torch.float64), rest])


def _rounded(x: Tensor, coefficients: Sequence[Triple], restarts: Sequence[int], roundoff: float) -> Tensor:
    """Singular values after the Gram form, each segment's R and Q moved by what rounding may do to them."""
    q, r = torch.ones_like(x), x * x + 2 * roundoff / math.sqrt(x.numel())
    for step, (a, b, c) in enumerate(coefficients):
        if step in restarts:
            x, q = _apply(q, x, roundoff), torch.ones_like(x)
            r = x * x + 2 * roundoff
        h = a + r * (b + r * c)
        q, r = q * h, r * h * h
    return _apply(q, x, roundoff)


def _apply(q: Tensor, x: Tensor, roundoff: float) -> Tensor:
    return (q + roundoff * q.abs().max()) * x
