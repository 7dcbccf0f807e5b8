"""torch's own batched products: runs on every device, and is what everything else falls back to."""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon_runtime.kernels._base import SymmetricKernel

__all__ = ["Cublas", "plain_product"]


def plain_product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
    """Write ``alpha * a @ b + beta * c`` to ``out``: [B, N, K], [B, K, M], [B, N, M] or None, [B, N, M]."""
    if c is not None:
        torch.baddbmm(c, a, b, beta=beta, alpha=alpha, out=out)
    elif alpha == 1.0:
        torch.bmm(a, b, out=out)
    else:
        torch.baddbmm(out, a, b, beta=0.0, alpha=alpha, out=out)  # beta 0: what is in out is not read


class Cublas(SymmetricKernel):
    """The full product; its symmetry is not used."""

    name = "cublas"

    def available(self, device: torch.device) -> tuple[bool, str]:
        """Always true."""
        return True, "universal fallback"

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        plain_product(a, b, c, alpha, beta, out)
