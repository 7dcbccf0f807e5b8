"""The element-wise passes of Newton-Schulz: fused Triton kernels on CUDA, plain torch elsewhere.

Note "Right at any scale". Squares of elements below 1e-19 or above 1e19 leave float32, so the largest magnitude is
divided out before anything is squared. Zeros stay zeros; a matrix with NaN or infinity turns NaN in all its elements.
A host knows at once whether a norm says that nothing of weight left float32 (:data:`SAFE`), and is spared that pass.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from dmuon_runtime._tables import DTYPES

__all__ = ["add_identity", "cast", "normalize_into", "normalized"]

SAFE: Final = (1e-10, 1e18)
"""Norms between these lost at most 1e-18 of their square for each element, far from what float32 resolves."""


@lru_cache(maxsize=1)
def _fused() -> ModuleType | None:
    """The Triton kernels, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("dmuon_runtime._elementwise_triton")


def normalized(g: Tensor, out: Tensor | None = None) -> Tensor:
    """Return [b, m, n] with Frobenius norm 1 each, of ``g`` [..., m, n], in float32 (float64 stays).

    Plain torch: the reference of :func:`normalize_into`, and what runs on a CPU. The result is written to ``out``
    [b, m, n], in its dtype, where that is given.
    """
    x = g.reshape(-1, *g.shape[-2:])
    x = x if x.dtype == torch.float64 else x.float()
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if x.device.type == "cpu" and all(SAFE[0] < value < SAFE[1] for value in norm.flatten().tolist()):
        return torch.div(x, norm, out=out)
    safe = (norm > SAFE[0]) & (norm < SAFE[1])
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    x = x / torch.where(safe | (largest == 0), 1.0, largest)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return torch.div(x, torch.where(norm == 0, 1.0, norm), out=out)


def normalize_into(tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Write each tensor [..., m, n], normalised, to its out [b, m, n], contiguous, in that one's dtype."""
    fused = _fused() if all(g.device.type == "cuda" and g.dtype in DTYPES for g in tensors) else None
    if fused is None:
        for g, out in zip(tensors, outs, strict=True):
            normalized(g, out)
    else:
        fused.normalize([g.contiguous() for g in tensors], outs)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous ``x`` in ``dtype``, ``x`` itself where it has it."""
    fused = _fused() if x.device.type == "cuda" and x.dtype != dtype and x.dtype != torch.float64 else None
    return x.to(dtype) if fused is None else fused.cast(x, dtype)


def add_identity(z: Tensor, a: float) -> Tensor:
    """Add ``a I`` to contiguous ``z`` [B, N, N] in place, and return it."""
    fused = _fused() if z.device.type == "cuda" else None
    if fused is None:
        z.diagonal(dim1=-2, dim2=-1).add_(a)
    else:
        fused.add_identity(z, a)
    return z
