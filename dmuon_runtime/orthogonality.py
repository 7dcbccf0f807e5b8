"""How far from orthogonal a result is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["orthogonality_error"]


@torch.no_grad()
def orthogonality_error(matrix: Tensor) -> Tensor:
    """Return the largest ``|sigma^2 - 1|`` over the singular values of each matrix of ``matrix`` [..., m, n]: [...].

    Computed from the eigenvalues of the Gram matrix of the short side. A matrix of exact zeros has no direction to
    orthogonalise and gives 0, an empty one too, and one with NaN or infinity gives infinity.
    """
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2], dtype=torch.float32)
    x = matrix if matrix.dtype == torch.float64 else matrix.float()
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    x = torch.where(finite[..., None, None], x, 0.0)
    error = (torch.linalg.eigvalsh(x @ x.mT) - 1).abs().amax(dim=-1)
    error = torch.where((x == 0).all(dim=-1).all(dim=-1), 0.0, error)
    return torch.where(finite, error, torch.inf)
