"""What a call of Newton-Schulz refuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["checked_restarts", "checked_steps", "refuse_non_matrices", "with_index"]


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` as tensors on it name it."""
    return torch.empty(0, device=device).device


def refuse_non_matrices(matrices: Sequence[Tensor]) -> None:
    """Raise ValueError naming all tensors that are no floating matrices, and all batches without a matrix."""
    bad = [f"[{index}] {found}" for index, g in enumerate(matrices) if (found := _mistake(g)) is not None]
    if bad:
        raise ValueError(
            f"Newton-Schulz takes floating dense tensors [..., m, n], found {'; '.join(bad)}: cast integers to a "
            "floating dtype, split complex tensors, make sparse ones dense, make tensors of other objects, gather "
            "distributed ones (full_tensor), give vectors two dims or to AdamW, leave empty batches out"
        )


def _mistake(g: object) -> str | None:
    """What is wrong with an input, in words; None if nothing is."""
    if not isinstance(g, Tensor):
        return f"a {type(g).__name__}"
    if g.dim() < 2 or not g.dtype.is_floating_point:
        return f"{tuple(g.shape)} {g.dtype}"
    if isinstance(g, DTensor):
        return f"{tuple(g.shape)}, a distributed tensor"
    if g.layout != torch.strided:
        return f"{tuple(g.shape)} {g.dtype} with layout {str(g.layout).removeprefix('torch.')}"
    return f"{tuple(g.shape)}, an empty batch" if 0 in g.shape[:-2] else None


def checked_steps(steps: int) -> int:
    """Return ``steps``; ValueError where it is no whole number of at least 1."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1 step, found {steps!r}; the usual number is 5")
    return steps


def checked_restarts(restarts: Sequence[int]) -> tuple[int, ...]:
    """Return restarts in order; ValueError where they are no different whole numbers of at least 1."""
    try:
        found = list(restarts)
    except TypeError:
        found = None
    whole = found is not None and all(type(restart) is int and restart >= 1 for restart in found)
    if found is None or not whole or len(set(found)) != len(found):
        raise ValueError(
            "restart_iterations must be a list of different whole steps of at least 1 (0-based; step 0 always starts "
            f"anew), found {restarts!r}; the default for 5 steps is [2]"
        )
    return tuple(sorted(found))
