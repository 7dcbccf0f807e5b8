"""What a call of Newton-Schulz refuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["checked_restarts", "refuse_non_matrices", "with_index"]


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` as tensors on it name it."""
    return torch.empty(0, device=device).device


def refuse_non_matrices(matrices: Sequence[Tensor]) -> None:
    """Raise ValueError naming all tensors that are no floating matrices."""
    bad = [
        f"[{index}] {tuple(g.shape)} {g.dtype}"
        for index, g in enumerate(matrices)
        if g.dim() < 2 or not g.dtype.is_floating_point
    ]
    if bad:
        raise ValueError(
            f"Newton-Schulz takes floating tensors [..., m, n], found {'; '.join(bad)}: cast integers to a floating "
            "dtype, split complex tensors, and give vectors two dims or to AdamW"
        )


def checked_restarts(restarts: Sequence[int]) -> tuple[int, ...]:
    """Return restarts in order; ValueError where one is below 1 or stands twice."""
    bad = [restart for restart in restarts if not isinstance(restart, int) or restart < 1]
    if bad or len(set(restarts)) != len(restarts):
        raise ValueError(
            f"restart_iterations must be different whole steps of at least 1 (0-based; step 0 always starts anew), "
            f"found {list(restarts)}"
        )
    return tuple(sorted(restarts))
