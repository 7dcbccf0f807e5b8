"""The reserved name of a symmetric kernel for Ampere."""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon_runtime.kernels._base import SymmetricKernel

__all__ = ["CuteSm80"]


class CuteSm80(SymmetricKernel):
    """Not built in this version; the name is kept so that a spec that asks for it is told so."""

    name = "cute_sm80"

    def available(self, device: torch.device) -> tuple[bool, str]:
        """Always false."""
        return False, "not built yet in this version; use 'cublas' or 'auto'"

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        raise AssertionError("cute_sm80 was launched although it is never available")
