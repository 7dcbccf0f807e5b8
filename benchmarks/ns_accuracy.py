"""How accurate Newton-Schulz is: coefficients, forms, dtypes and restarts against the same polynomial in fp64.

    python -m benchmarks.ns_accuracy [--quick]

Matrices are made from known singular values, so the exact result is known. 16-bit dtypes are emulated: products of
16-bit operands in fp32, rounded once when stored, the lower triangle of a symmetric product mirrored. *Both halves*
computes the upper one too, as cuBLAS does and quack on the diagonal. Real bfloat16 of this CPU runs too, as it would on
request (``torch.set_float32_matmul_precision("medium")``, which takes the direct form alone), and, where there is a
CUDA device, real float16.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

import dmuon_runtime as dmuon
from benchmarks.common import print_table, write_result
from dmuon_runtime._elementwise import normalized
from dmuon_runtime._last_product import last_product
from dmuon_runtime._ns_iterations import direct_iteration, gram_iteration
from dmuon_runtime.coefficients import Triple, apply_polynomials
from dmuon_runtime.kernels import KERNELS, SymmetricKernel
from dmuon_runtime.newton_schulz import default_restarts

__all__ = ["FORMS", "SETS", "SPECTRA", "Emulated", "errors_of", "main", "make_matrix", "on_device", "run"]

STEPS = 5
FORMS: Mapping[str, tuple[int, ...] | None] = {
    "direct": None, "gram []": (), "gram [1]": (1,), "gram [2]": (2,), "gram [3]": (3,), "gram [4]": (4,),
    "gram [2, 4]": (2, 4),
}  # fmt: skip
"""Name to restarts; None is the direct form."""
SETS: Mapping[str, tuple[Triple, ...]] = {
    "Polar Express": dmuon.POLAR_EXPRESS_COEFFICIENTS,
    "You": dmuon.YOU_COEFFICIENTS,
    "Keller Jordan": dmuon.KELLER_JORDAN_COEFFICIENTS,
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SUBSPACE = 1e-2
"""Singular values above it, in units of the Frobenius norm, are what an update should get right."""


class Emulated(SymmetricKernel):
    """Products as a GPU computes them in ``dtype``, on fp32 tensors that hold values of ``dtype``."""

    name = "emulated"

    def __init__(self, dtype: torch.dtype, mirrors: bool = True) -> None:
        self._dtype, self._mirrors = dtype, mirrors

    def available(self, device: torch.device) -> tuple[bool, str]:
        """Always true."""
        return True, f"{self._dtype} emulated"

    def round(self, x: Tensor) -> Tensor:
        """Round to the dtype, kept in fp32."""
        return x.to(self._dtype).float()

    def rectangular(self, left: Tensor, right: Tensor) -> Tensor:
        """A plain product, rounded when stored."""
        return self.round(left @ right)

    def add_identity(self, z: Tensor, a: float) -> Tensor:
        """Add to the stored matrix, and round again."""
        return self.round(z + a * torch.eye(z.shape[-1], device=z.device))

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        total = alpha * (a @ b) + (0.0 if c is None else beta * c)
        whole = self.round(total)
        out.copy_(whole.tril() + whole.tril(-1).mT if self._mirrors else whole)


def _log_spectrum(n: int) -> Tensor:
    return torch.logspace(0, -3, n, dtype=torch.float64)


def _few_and_noise(n: int) -> Tensor:
    return torch.cat([torch.ones(8), torch.full((n - 8,), 1e-3)]).double()


def _one_large(n: int) -> Tensor:
    return torch.cat([torch.ones(1), torch.full((n - 1,), 3e-2)]).double()


def _two_and_tail(n: int) -> Tensor:
    return torch.cat([torch.ones(2), 1e-2 / torch.arange(1, n - 1)]).double()


def _first_gradient(n: int) -> Tensor:
    return torch.cat([torch.ones(1), 6e-2 / torch.arange(1, n)]).double()


SPECTRA: Mapping[str, Callable[[int], Tensor]] = {
    "gaussian": lambda n: torch.linspace(1 + 0.5**0.5, 1 - 0.5**0.5, n, dtype=torch.float64),
    "1/k": lambda n: 1.0 / torch.arange(1, n + 1, dtype=torch.float64),
    "log, 3 decades": _log_spectrum,
    "rank 8 + noise": _few_and_noise,
    "rank 2 + tail": _two_and_tail,
    "one large": _one_large,
    "first gradient": _first_gradient,
}
"""Singular values up to a factor. ``gaussian``: spread over the range of a Gaussian matrix of twice as many columns.
``first gradient``: like those of a Llama in its first steps."""


@dataclass(frozen=True, eq=False)
class Known:
    """A matrix [n, m] with its singular vectors [n, n], [m, n] and singular values of norm 1."""

    matrix: Tensor
    left: Tensor
    values: Tensor
    right: Tensor

    @cache  # noqa: B019 - a matrix is small, and there are few
    def exact(self, coefficients: tuple[Triple, ...]) -> Tensor:
        """The polynomial in fp64."""
        lifted = apply_polynomials(self.values, coefficients)
        return self.left * lifted @ self.right.mT


def make_matrix(spectrum: str, n: int, m: int) -> Known:
    """Return a matrix with the singular values of ``spectrum`` and random singular vectors."""
    generator = torch.Generator().manual_seed(n)
    left, right = (torch.linalg.qr(torch.randn(rows, n, generator=generator, dtype=torch.float64)).Q for rows in (n, m))
    values = SPECTRA[spectrum](n)
    values = values / torch.linalg.vector_norm(values)
    return Known((left * values @ right.mT).float(), left, values, right)


def emulated(
    known: Known, coefficients: tuple[Triple, ...], restarts: tuple[int, ...] | None, kernel: Emulated
) -> Tensor:
    """Orthogonalise as ``kernel`` does; float32 is itself."""
    x = kernel.round(normalized(known.matrix))
    if restarts is None:
        longs, q = direct_iteration([x], coefficients, kernel)
    else:
        longs, q = gram_iteration([x], coefficients, restarts, kernel)
    return kernel.rectangular(*longs[0].operands(q))[0]


def on_cpu_in_bfloat16(known: Known, coefficients: tuple[Triple, ...], restarts: tuple[int, ...] | None) -> Tensor:
    """Orthogonalise as a CPU with bfloat16 units does on request, the Gram form included, which then is not chosen."""
    x, kernel = normalized(known.matrix).bfloat16(), KERNELS["cublas"]
    if restarts is None:
        longs, q = direct_iteration([x], coefficients, kernel)
    else:
        longs, q = gram_iteration([x], coefficients, restarts, kernel)
    return last_product(longs[0], q, torch.float32, kernel.name)[0]


def on_device(known: Known, coefficients: tuple[Triple, ...], restarts: tuple[int, ...] | None) -> Tensor:
    """Orthogonalise on the CUDA device as a user would."""
    form: Literal["direct", "gram"] = "direct" if restarts is None else "gram"
    ns = dmuon.NewtonSchulz(form, coefficients=coefficients, restart_iterations=restarts)
    return ns(known.matrix.cuda(), STEPS).cpu()


def errors_of(known: Known, coefficients: tuple[Triple, ...], result: Tensor) -> dict[str, float]:
    """Relative Frobenius errors over the matrix and over the subspace, the worst of a direction, the largest value.

    A direction is a right singular vector of the subspace; its error is relative to its own length.
    """
    exact, result = known.exact(coefficients), result.double()
    kept = known.values > SUBSPACE
    left, right = known.left[:, kept], known.right[:, kept]
    inner = left.mT @ (result - exact) @ right
    off = torch.linalg.vector_norm((result - exact) @ right, dim=0) / torch.linalg.vector_norm(exact @ right, dim=0)
    return {
        "error": float((result - exact).norm() / exact.norm()),
        "subspace error": float(inner.norm() / (left.mT @ exact @ right).norm()),
        "direction error": float(off.max()),
        "largest": _largest(result.float()),
    }


def _largest(result: Tensor) -> float:
    """Largest singular value of [n, m], n at most m."""
    gram = result @ result.mT
    return float(torch.linalg.eigvalsh(gram)[-1]) ** 0.5 if bool(gram.isfinite().all()) else float("inf")


def run(n: int, m: int, spectra: Iterable[str] = tuple(SPECTRA)) -> list[dict[str, Any]]:
    """All combinations on matrices [n, m]; one row each."""
    rows: list[dict[str, Any]] = []
    kernels = {str(dtype).removeprefix("torch."): Emulated(dtype) for dtype in DTYPES}
    kernels["float16, both halves"] = Emulated(torch.float16, mirrors=False)
    for spectrum in spectra:
        known = make_matrix(spectrum, n, m)
        for (chosen, coefficients), (form, restarts) in itertools.product(SETS.items(), FORMS.items()):
            results = {name: emulated(known, coefficients, restarts, kernel) for name, kernel in kernels.items()}
            results["bfloat16 on this CPU"] = on_cpu_in_bfloat16(known, coefficients, restarts)
            if torch.cuda.is_available():
                results["float16 on CUDA"] = on_device(known, coefficients, restarts)
            label = f"{form} (default)" if restarts == default_restarts(STEPS) else form
            for dtype, result in results.items():
                row = {"coefficients": chosen, "spectrum": spectrum, "form": label, "dtype": dtype}
                rows.append(row | errors_of(known, coefficients, result))
    return rows


def main(arguments: list[str]) -> int:
    """Run, print, write; return the exit status."""
    n, m = (256, 512) if "--quick" in arguments else (384, 768)
    rows = run(n, m)
    rows.sort(key=lambda row: (row["coefficients"], row["dtype"], row["spectrum"], row["form"]))
    cells = [[f"{value:.2g}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    print_table(list(rows[0]), cells)
    write_result("ns_accuracy", rows, matrix=[n, m], steps=STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
