"""Adapter to the symmetric GEMM of quack-kernels (Hopper and later)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from dmuon_runtime.kernels._base import SymmetricKernel

__all__ = ["ADAPTER_READY", "Quack"]

ADAPTER_READY = True
"""Set to False to take the adapter out of service from the next call on, without uninstalling anything."""

MIN_SHORT_DIM = 256
"""Below it a symmetric tile covers most of the matrix and the fixed cost of a launch decides."""
ALIGNMENT = 8
"""16 bytes of a 16-bit dtype along the contiguous dim."""


@lru_cache(maxsize=1)
def _import_product() -> tuple[Callable[..., Any] | None, str]:
    try:
        module = importlib.import_module("quack.gemm_interface")
        return cast("Callable[..., Any]", module.gemm_symmetric), "quack-kernels"
    except ImportError as error:
        return None, f"quack-kernels is not importable ({error}); pip install 'dmuon-service[quack]'"
    except Exception as error:  # its compiler stack fails in many ways when versions clash
        return None, f"quack-kernels fails to import: {type(error).__name__}: {error}"


class Quack(SymmetricKernel):
    """quack's symmetric GEMM: only tiles on or below the diagonal are computed."""

    name = "quack"
    product_share = 0.5

    def available(self, device: torch.device) -> tuple[bool, str]:
        """True on a CUDA device of compute capability 9.0 or more with quack-kernels, unless switched off."""
        if not ADAPTER_READY:
            return False, "switched off: syrk_quack.ADAPTER_READY is False"
        if device.type != "cuda":
            return False, f"needs an SM90+ CUDA device, found {device.type}"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 9:
            return False, f"needs SM90+, found SM{major}{minor}"
        product, detail = _import_product()
        return product is not None, detail

    def serves(self, short_dim: int, long_dim: int, dtype: torch.dtype) -> bool:
        """16-bit dtypes, aligned dims, and a short side worth its fixed cost."""
        aligned = short_dim % ALIGNMENT == 0 and long_dim % ALIGNMENT == 0
        return dtype in (torch.float16, torch.bfloat16) and aligned and short_dim >= MIN_SHORT_DIM

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        product, detail = _import_product()
        assert product is not None, detail
        product(a, b, C=c, out=out, alpha=float(alpha), beta=float(beta))
