"""Orthogonalisation by direct Newton-Schulz iteration in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NewtonSchulz"]


@dataclass
class _Ledger:
    launches: int = 0
    matrices: int = 0
    seconds: float = 0.0


class NewtonSchulz:
    """Direct iteration with the quintic (3.4445, -4.775, 2.0315)."""

    def __init__(
        self,
        backend: str = "gram",
        kernel: str = "auto",
        coefficients: Sequence[tuple[float, float, float]] | None = None,
        restart_iterations: Sequence[int] | None = None,
        deterministic: bool = False,
    ) -> None:
        self.algorithm = "direct"
        self.kernel = "cublas"
        self.ledger = _Ledger()

    def orthogonalize(self, matrices: Sequence[Tensor], steps: int) -> list[Tensor]:
        """Return an approximate polar factor of each [..., m, n]."""
        self.ledger.matrices += sum(m[..., 0, 0].numel() for m in matrices)
        return [self._one(matrix, steps) for matrix in matrices]

    def _one(self, matrix: Tensor, steps: int) -> Tensor:
        x = matrix.to(torch.float32)
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(steps):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
            self.ledger.launches += 3
        result: Tensor = (x.mT if tall else x).to(matrix.dtype)
        return result
