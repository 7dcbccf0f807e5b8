"""Newton-Schulz as functions of one tensor, for whoever has no use for a configured :class:`NewtonSchulz`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dmuon_runtime.newton_schulz import NewtonSchulz

__all__ = ["direct_newton_schulz", "gram_newton_schulz", "newton_schulz"]


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    *,
    coefficients: Sequence[Sequence[float]] | None = None,
    restart_iterations: Sequence[int] | None = None,
) -> Tensor:
    """Orthogonalise ``matrix`` [..., m, n] with the defaults of :class:`NewtonSchulz`."""
    return NewtonSchulz(coefficients=coefficients, restart_iterations=restart_iterations)(matrix, steps)


def gram_newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    *,
    coefficients: Sequence[Sequence[float]] | None = None,
    restart_iterations: Sequence[int] | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Orthogonalise ``matrix`` [..., m, n] through its Gram matrix."""
    ns = NewtonSchulz("gram", "auto", coefficients, restart_iterations, deterministic)
    return ns(matrix, steps)


def direct_newton_schulz(
    matrix: Tensor, steps: int = 5, *, coefficients: Sequence[Sequence[float]] | None = None
) -> Tensor:
    """Orthogonalise ``matrix`` [..., m, n] by the classic form."""
    return NewtonSchulz("direct", coefficients=coefficients)(matrix, steps)
