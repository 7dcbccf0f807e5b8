"""The distributed Muon runtime: routing, ownership, communication, kernels and state. Depends on torch alone."""

from dmuon_runtime.coefficients import (
    KELLER_JORDAN_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
)
from dmuon_runtime.kernels._registry import get_backend_status, get_ns_backend
from dmuon_runtime.newton_schulz import (
    NewtonSchulz,
    direct_newton_schulz,
    gram_newton_schulz,
    newton_schulz,
    orthogonality_error,
)

__all__ = [
    "KELLER_JORDAN_COEFFICIENTS", "POLAR_EXPRESS_COEFFICIENTS", "YOU_COEFFICIENTS", "NewtonSchulz",
    "direct_newton_schulz", "get_backend_status", "get_ns_backend", "gram_newton_schulz", "newton_schulz",
    "orthogonality_error",
]  # fmt: skip
