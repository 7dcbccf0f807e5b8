"""What every kernel is: an object that computes batched symmetric products and counts its own launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from dmuon_runtime._elementwise import add_identity
from dmuon_runtime.ledger import LEDGER

__all__ = ["KernelUnavailable", "SymmetricKernel"]


class KernelUnavailable(ValueError, RuntimeError):
    """A kernel that was asked for by name cannot run here."""

    code = "kernel_unavailable"

    def __init__(self, kernel: str, detail: str) -> None:
        self.kernel, self.detail = kernel, detail
        super().__init__(kernel, detail)

    def __str__(self) -> str:
        return f"Newton-Schulz kernel {self.kernel!r} cannot run here: {self.detail}"


class SymmetricKernel(ABC):
    """One way to compute ``alpha * A @ B + beta * C`` where the result is known to be symmetric.

    Attributes:
        name: What users type and metrics show.
        product_share: FLOPs of a symmetric product over those of a plain one, for choosing an algorithm.
    """

    name: ClassVar[str]
    product_share: ClassVar[float] = 1.0

    @abstractmethod
    def available(self, device: torch.device) -> tuple[bool, str]:
        """Return whether it can run on ``device``, and what it is or what to install."""

    def fits(self, device: torch.device) -> bool:
        """Return whether ``auto`` may choose it on ``device``."""
        return self.available(device)[0]

    def is_meant_for(self, device: torch.device) -> bool:
        """Return whether ``device`` is of the generation for which this kernel is the best, be it available or not."""
        return False

    def serves(self, short_dim: int, long_dim: int, dtype: torch.dtype) -> bool:
        """Return whether matrices of this size and compute dtype may go to it."""
        return True

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, *,
        alpha: float = 1.0, beta: float = 1.0, out: Tensor | None = None, algorithm: str = "gram",
    ) -> Tensor:  # fmt: skip
        """Return ``alpha * a @ b + beta * c``, and count the launch.

        Args:
            a: [B, N, K].
            b: [B, K, N], such that ``a @ b`` is symmetric.
            c: [B, N, N] symmetric, or None for no term.
            out: [B, N, N] to write to; must not overlap the operands.
            algorithm: ``gram`` or ``direct``, for the ledger.
        """
        if out is None:
            out = a.new_empty(a.shape[0], a.shape[1], a.shape[1])
        self._launch(a, b, c, alpha, beta, out)
        LEDGER.count_launch(self.name, algorithm)
        return out

    def tuned(self, choices: Mapping[str, str]) -> SymmetricKernel:
        """Return the kernel with what was measured to be fastest; itself where there is nothing to choose."""
        return self

    def rectangular(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the plain product ``left @ right``: [B, M, K], [B, K, N] to [B, M, N]."""
        return torch.bmm(left, right)

    def adds_at_once(self, left: Tensor, right: Tensor) -> bool:
        """Return whether :meth:`rectangular_plus` costs less than an added identity and :meth:`rectangular`."""
        return False

    def rectangular_plus(
        self, left: Tensor, right: Tensor, c: Tensor, beta: float, out: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Return ``left @ right + beta * c``, added before rounding, in ``out`` where that is given.

        Asked for only where :meth:`adds_at_once`, and in bfloat16.
        """
        return torch.baddbmm(c, left, right, beta=beta, out=out)

    def add_identity(self, z: Tensor, a: float) -> Tensor:
        """Add ``a I`` to contiguous ``z`` [B, N, N] in place, and return it."""
        return add_identity(z, a)

    @abstractmethod
    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        """Write the product to ``out``."""
