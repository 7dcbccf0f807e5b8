"""Our own symmetric product for Ampere: the lower triangle of tiles, each written twice.

It is written in Triton, which comes with torch and compiles in seconds, where CuTe-DSL is one more pinned package and
compiles in tens of seconds. The name is the one that users know for this place in the ladder.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from dmuon_runtime.kernels._base import SymmetricKernel

__all__ = ["CuteSm80"]

MIN_CAPABILITY = (8, 0)
MIN_SHORT_DIM = 64


@lru_cache(maxsize=1)
def _module() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dmuon_runtime.kernels._triton_symmetric")


class CuteSm80(SymmetricKernel):
    """Asynchronous copies and tensor-core products of SM80; newer chips run it too."""

    name = "cute_sm80"
    product_share = 0.55

    def available(self, device: torch.device) -> tuple[bool, str]:
        """True on a CUDA device of compute capability 8.0 or more, with Triton."""
        if device.type != "cuda":
            return False, f"needs an SM80+ CUDA device, found {device.type}"
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            return False, f"needs SM80+, found SM{capability[0]}{capability[1]}"
        return _module() is not None, "DMuon internal, Triton" if _module() else "needs triton; pip install triton"

    def fits(self, device: torch.device) -> bool:
        """On SM8x alone: newer chips have better, and get this kernel when it is named."""
        return self.is_meant_for(device) and self.available(device)[0]

    def is_meant_for(self, device: torch.device) -> bool:
        """SM8x."""
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == MIN_CAPABILITY[0]

    def serves(self, short_dim: int, long_dim: int, dtype: torch.dtype) -> bool:
        """16-bit dtypes and a short side of at least a tile."""
        return dtype in (torch.float16, torch.bfloat16) and short_dim >= MIN_SHORT_DIM

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        module = _module()
        assert module is not None, "triton is not installed"
        module.symmetric_product(a, b.mT, c, alpha, beta, out)
