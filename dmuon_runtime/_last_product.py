"""The last product of Newton-Schulz, in the dtype that the caller wants.

It is a plain (rectangular) product. cuBLAS through torch writes the dtype of its operands or float32, and a cast behind
it moves each element twice more (an eighth to a third of the product); on Hopper quack's GEMM writes bfloat16 from
float16 operands directly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon_runtime._elementwise import cast
from dmuon_runtime._ns_iterations import Long
from dmuon_runtime.kernels import syrk_quack

__all__ = ["last_product"]

MIN_FLOPS_FOR_QUACK = 4e10
"""Below it quack's GEMM, which takes one tile for all sizes, loses to cuBLAS and a cast (measured on an H200)."""


def last_product(long: Long, q: Tensor, dtype: torch.dtype, kernel: str) -> Tensor:
    """Return ``Q X + factor X`` of a stack [b, rows, cols] in ``dtype``, in memory that nobody else holds.

    ``q`` is the last Q of the stack's group, [B, N, N]; ``kernel`` the name of what computed the symmetric products.
    """
    left, right = long.operands(q)
    if long.factor:
        return cast(torch.baddbmm(long.x, left, right, beta=long.factor, out=long.spare), dtype)
    if left.dtype == dtype:
        return torch.bmm(left, right)
    if dtype == torch.float32 and left.device.type == "cuda":  # straight from the accumulator
        return torch.bmm(left, right, out_dtype=dtype)
    flops = 2.0 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]
    large = dtype == torch.bfloat16 and flops >= MIN_FLOPS_FOR_QUACK
    if large and kernel == syrk_quack.Quack.name and syrk_quack.rectangular_ready(left, right):
        return syrk_quack.rectangular(left, right, dtype)
    return cast(torch.bmm(left, right), dtype)
