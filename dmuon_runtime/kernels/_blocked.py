"""Our own symmetric product in plain torch: lower block triangle only, mirrored."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from dmuon_runtime.kernels._base import SymmetricKernel
from dmuon_runtime.kernels._cublas import half_product, in_strips, plain_product

__all__ = ["Blocked"]

LEAF: Final = 256
"""Blocks up to this size are computed whole: below it, launches cost more than the saved half."""


class Blocked(SymmetricKernel):
    """Recursive halves: of the four blocks of a product three are computed, and two of them again by halves.

    The share of the FLOPs is 1/2 + 1/2^(d+1) at depth d.
    """

    name = "blocked"
    product_share = 0.625

    def __init__(self, leaf: int = LEAF) -> None:
        self._leaf = leaf

    def available(self, device: torch.device) -> tuple[bool, str]:
        """Always true."""
        return True, "block triangle in plain torch"

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        num_rows = a.shape[1]
        if in_strips(a):
            half_product(a, b, c, alpha, beta, out)
            return
        if num_rows <= self._leaf:
            plain_product(a, b, c, alpha, beta, out)
            return
        half = (num_rows + 1) // 2
        top, bottom = slice(0, half), slice(half, num_rows)
        for part in (top, bottom):
            c_part = None if c is None else c[:, part, part]
            self._launch(a[:, part], b[:, :, part], c_part, alpha, beta, out[:, part, part])
        c_low = None if c is None else c[:, bottom, top]
        plain_product(a[:, bottom], b[:, :, top], c_low, alpha, beta, out[:, bottom, top])
        out[:, top, bottom].copy_(out[:, bottom, top].mT)
