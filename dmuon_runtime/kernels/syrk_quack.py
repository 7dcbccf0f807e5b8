"""Adapter to the symmetric GEMM of quack-kernels (Hopper and later)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from dmuon_runtime.kernels._base import SymmetricKernel
from dmuon_runtime.kernels._settings import keep_compiled_kernels
from dmuon_runtime.kernels._tiles import Product, Tile, decide_plain_tile, decide_tile

__all__ = ["ADAPTER_READY", "Quack", "product_of", "rectangular", "rectangular_ready"]

ADAPTER_READY = True
"""Set to False to take the adapter out of service from the next call on, without uninstalling anything."""

MIN_MAJOR = 9
"""Of the compute capability."""
MIN_SHORT_DIM = 256
"""Below it a tile covers most of the matrix and the fixed cost of a launch decides."""
ALIGNMENT = 8
"""16 bytes of a 16-bit dtype along the contiguous dim."""


@lru_cache(maxsize=1)
def _import_product() -> tuple[Callable[..., Any] | None, str]:
    keep_compiled_kernels()
    try:
        module = importlib.import_module("quack.gemm_symmetric")
        return cast("Callable[..., Any]", module.gemm_symmetric), "quack-kernels"
    except ImportError as error:
        return None, f"quack-kernels is not importable ({error}); pip install 'dmuon-service[quack]'"
    except Exception as error:  # its compiler stack fails in many ways when versions clash
        return None, f"quack-kernels fails to import: {type(error).__name__}: {error}"


@lru_cache(maxsize=16)
def _available_on(device: torch.device) -> tuple[bool, str]:
    major, minor = torch.cuda.get_device_capability(device)
    if major < MIN_MAJOR:
        return False, f"needs SM90+, found SM{major}{minor}"
    product, detail = _import_product()
    return product is not None, detail


class Quack(SymmetricKernel):
    """quack's symmetric GEMM: only tiles on or below the diagonal are computed."""

    name = "quack"
    product_share = 0.65

    def __init__(self, choices: Mapping[str, str] | None = None) -> None:
        self._choices: Mapping[str, str] = choices or {}

    def tuned(self, choices: Mapping[str, str]) -> SymmetricKernel:
        """Return the kernel with the tiles that ``choices`` name by :attr:`Product.key`."""
        return type(self)(choices)

    def available(self, device: torch.device) -> tuple[bool, str]:
        """True on a CUDA device of compute capability 9.0 or more with quack-kernels, unless switched off."""
        if not ADAPTER_READY:
            return False, "switched off: syrk_quack.ADAPTER_READY is False"
        if device.type != "cuda":
            return False, f"needs an SM90+ CUDA device, found {device.type}"
        return _available_on(device)

    def is_meant_for(self, device: torch.device) -> bool:
        """Hopper and later."""
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= MIN_MAJOR

    def serves(self, short_dim: int, long_dim: int, dtype: torch.dtype) -> bool:
        """16-bit dtypes, aligned dims, and a short side worth its fixed cost."""
        aligned = short_dim % ALIGNMENT == 0 and long_dim % ALIGNMENT == 0
        return dtype in (torch.float16, torch.bfloat16) and aligned and short_dim >= MIN_SHORT_DIM

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        product, detail = _import_product()
        assert product is not None, detail
        tile = decide_tile(product_of(a, b, c), self._choices)
        product(
            a, b.mT, out, c, None, tile.tile_m, tile.tile_n, tile.cluster_m, tile.cluster_n,
            pingpong=tile.ping_pong, alpha=float(alpha), beta=float(beta),
        )  # fmt: skip

    def adds_at_once(self, left: Tensor, right: Tensor) -> bool:
        """True where quack's plain GEMM may run and has a fast tile."""
        return _plain_tile(left, right) is not None and rectangular_ready(left, right)

    def rectangular_plus(
        self, left: Tensor, right: Tensor, c: Tensor, beta: float, out: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """As in the base class; cuBLAS would first copy ``c``."""
        tile = _plain_tile(left, right)
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[2]) if out is None else out
        assert tile is not None, "adds_at_once was not asked"
        _plain_product()(
            left, right.mT, out, c, None, tile.tile_m, tile.tile_n, tile.cluster_m, tile.cluster_n,
            pingpong=tile.ping_pong, beta=float(beta),
        )  # fmt: skip
        return out


def _plain_tile(left: Tensor, right: Tensor) -> Tile | None:
    return decide_plain_tile(left.shape[0], left.shape[1], right.shape[2])


def product_of(a: Tensor, b: Tensor, c: Tensor | None) -> Product:
    """Describe the product of [B, N, K] and [B, K, N] for the choice of a tile."""
    contiguous = a.stride(-1) == 1 == b.stride(-2)
    num_matrices, short_dim, inner_dim = a.shape
    return Product(num_matrices, short_dim, inner_dim, contiguous, c is not None, str(a.dtype).removeprefix("torch."))


@lru_cache(maxsize=1)
def _plain_product() -> Callable[..., Any]:
    return cast("Callable[..., Any]", importlib.import_module("quack.gemm").gemm)


@lru_cache(maxsize=1)
def _gemm() -> Callable[..., Any]:
    return cast("Callable[..., Any]", importlib.import_module("quack.gemm_interface").gemm)


def rectangular_ready(left: Tensor, right: Tensor) -> bool:
    """True when quack's plain GEMM may multiply ``left`` [B, M, K] and ``right`` [B, K, N] here and now."""
    aligned = all(dim % ALIGNMENT == 0 for dim in (*left.shape[1:], right.shape[2]))
    return aligned and left.dtype in (torch.float16, torch.bfloat16) and Quack().available(left.device)[0]


def rectangular(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left @ right`` in ``dtype``, which may differ from the operands'."""
    out = torch.empty(left.shape[0], left.shape[1], right.shape[2], dtype=dtype, device=left.device)
    _gemm()(left, right, out=out, tuned=False)
    return out
