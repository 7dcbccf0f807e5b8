"""torch's own batched products: runs on every device, and is what everything else falls back to."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from dmuon_runtime.kernels._base import SymmetricKernel

__all__ = ["Cublas", "half_product", "in_strips", "plain_product"]

MIN_HALVED: Final = 1024
"""Smallest side of which half is computed, in bfloat16 on a CPU; below it launches and copies cost what is saved."""
NUM_STRIPS: Final = 4
"""Measured on 2 cores with AVX512_BF16, of the time of a whole product without (and with) ``c``: 1.10 (1.17) at a side
of 512, 0.75 (0.76) at 1024, 0.70 (0.66) at 2048. Two strips: 0.97 (1.00), 0.81 (0.81), 0.80 (0.77)."""
WIDEST_STRIP: Final = 512


def plain_product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
    """Write ``alpha * a @ b + beta * c`` to ``out``: [B, N, K], [B, K, M], [B, N, M] or None, [B, N, M]."""
    if c is not None:
        torch.baddbmm(c, a, b, beta=beta, alpha=alpha, out=out)
    elif alpha == 1.0:
        torch.bmm(a, b, out=out)
    else:
        torch.baddbmm(out, a, b, beta=0.0, alpha=alpha, out=out)  # beta 0: what is in out is not read


def half_product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
    """Write ``alpha * a @ b + beta * c``, known to be symmetric, to ``out``: columns from the diagonal down, mirrored.

    Shapes [B, N, K], [B, K, N], [B, N, N] or None, [B, N, N]. The share of the FLOPs is 1/2 + 1/(2 s) with s strips.
    Matrices go one by one: oneDNN reads and writes parts of one matrix where they lie, and copies those of a batch.
    """
    width = min(WIDEST_STRIP, -(-a.shape[1] // NUM_STRIPS))
    for place in range(a.shape[0]):
        added, factor = (out[place], 0.0) if c is None else (c[place], beta)
        _from_the_diagonal_down(a[place], b[place], added, alpha, factor, out[place], width)


def _from_the_diagonal_down(
    a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float, out: Tensor, width: int
) -> None:  # fmt: skip
    """As :func:`half_product`, for matrices [N, K], [K, N], [N, N], [N, N], in strips of ``width`` columns."""
    num_rows = a.shape[0]
    for begin in range(0, num_rows, width):
        strip, rows, below = (slice(begin, begin + width), slice(begin, num_rows), slice(begin + width, num_rows))
        torch.addmm(c[rows, strip], a[rows], b[:, strip], beta=beta, alpha=alpha, out=out[rows, strip])
        if begin + width < num_rows:  # a transpose of contiguous memory, and two copies, take half the time of one copy
            out[strip, below].copy_(out[below, strip].contiguous().mT.contiguous())


def in_strips(a: Tensor) -> bool:
    """Return whether a symmetric product with ``a`` [B, N, K] is best done by :func:`half_product`."""
    return a.dtype == torch.bfloat16 and a.device.type == "cpu" and a.shape[1] >= MIN_HALVED


class Cublas(SymmetricKernel):
    """The full product; its symmetry is used for large bfloat16 matrices on a CPU alone (:func:`half_product`)."""

    name = "cublas"

    def available(self, device: torch.device) -> tuple[bool, str]:
        """Always true."""
        return True, "universal fallback"

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        product = half_product if in_strips(a) else plain_product
        product(a, b, c, alpha, beta, out)
