"""The two forms of the Newton-Schulz iteration, on normalised matrices.

Shape suffixes: B batch of matrices, N short side, M long side. A long operand is kept in the layout it came in, tall or
wide, and multiplied from its short side; nothing is transposed in memory. A symmetric right operand is passed as its
own transpose, the same numbers: a kernel that reads rows of B^T then finds them contiguous.

Note "Why the products are split so". In the Gram form everything but the last product is a polynomial of R = X X^T.
With z = b r + c r^2, a step takes q to z q + a q and r to h r h, where h = z + a. The identity is never added to z:
in half precision ``a q`` must be added in the accumulator of the product, not rounded into z first. A restart applies Q
to X and forms R anew from the rounded X, which removes what R and Q have drifted apart. Only where no product comes
first (a segment's first Q, and the direct form, which rounds X anew in every step) is ``a`` added to a diagonal; never
in bfloat16, where that would cost a third of the accuracy (0.013 instead of 0.009 on Gaussian matrices).

Note "From the left". All of these matrices commute, until they are rounded. A step makes h Q X of Q X, so h stands left
of Q, and h r h is the Gram matrix of that. With h on the right, which is the same on paper, what rounding leaves of
r h - h r grows by the eigenvalues of Q in every step, wherever a kernel computes both halves of a block (cuBLAS always,
quack on the diagonal): a matrix with one large singular value lost its direction, and some diverged (docs/log.md).

Note "The last product is the caller's". It reads the last X and Q and writes the result: outside a captured graph it
can write to fresh memory in the dtype that was asked for, and no copy is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_runtime.coefficients import Triple
from dmuon_runtime.kernels import SymmetricKernel

__all__ = ["Long", "decide_algorithm", "direct_iteration", "gram_iteration", "ns_flops"]


def ns_flops(
    algorithm: str, short_dim: int, long_dim: int, steps: int, num_restarts: int, product_share: float = 0.5
) -> float:
    """FLOPs for one matrix; ``product_share`` is what a symmetric product costs of a plain one.

    At one half this is T (3 M N^2 + N^3) for direct and 4 T N^3 + 3 (M N^2 - N^3)(1 + r) for Gram.
    """
    cube, long = 2.0 * short_dim**3, 2.0 * long_dim * short_dim**2
    if algorithm == "direct":
        return steps * (product_share * (long + cube) + long)
    segments = 1 + num_restarts
    num_cubes = 4 * steps - 3 * segments  # Z at each step, Q but at a segment's first, two for R but at its last
    return segments * (product_share * long + long) + num_cubes * product_share * cube


def decide_algorithm(short_dim: int, long_dim: int, steps: int, num_restarts: int, product_share: float) -> str:
    """Return the form with fewer FLOPs, ``gram`` on a tie."""
    gram, direct = (
        ns_flops(name, short_dim, long_dim, steps, num_restarts, product_share) for name in ("gram", "direct")
    )
    return "gram" if gram <= direct else "direct"


@dataclass(slots=True)
class Long:
    """One stack of matrices of a group, [B, N, M] or, when ``tall``, [B, M, N]; ``rows`` is its place in the group."""

    x: Tensor
    tall: bool
    rows: slice
    factor: float = 0.0
    """What times X is to be added to the last product."""
    spare: Tensor | None = None
    """Memory of the last X but one, for the next."""

    def gram(self, kernel: SymmetricKernel, out: Tensor, algorithm: str) -> None:
        """Write ``X X^T`` (of the wide reading) to its rows of ``out``, [B, N, N]."""
        left, right = (self.x.mT, self.x) if self.tall else (self.x, self.x.mT)
        kernel.symmetric(left, right, out=out[self.rows], algorithm=algorithm)

    def operands(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors whose product is ``Q X`` of the wide reading; ``q`` is [B, N, N] and symmetric."""
        return (self.x, q[self.rows]) if self.tall else (q[self.rows], self.x)

    def multiply(self, q: Tensor, kernel: SymmetricKernel) -> None:
        """Replace X by ``Q X`` of the wide reading."""
        self.x = kernel.rectangular(*self.operands(q))


def _stack(matrices: Sequence[Tensor]) -> tuple[list[Long], Tensor]:
    """Give each [b, rows, cols] its place, and make room for the common [B, N, N]."""
    longs, begin = [], 0
    for x in matrices:
        longs.append(Long(x, x.shape[1] > x.shape[2], slice(begin, begin + x.shape[0])))
        begin += x.shape[0]
    short_dim = min(matrices[0].shape[1:])
    return longs, matrices[0].new_empty(begin, short_dim, short_dim)


def gram_iteration(
    matrices: Sequence[Tensor], coefficients: Sequence[Triple], restarts: Sequence[int], kernel: SymmetricKernel
) -> tuple[list[Long], Tensor]:
    """Iterate on stacks that share a short side; the N x N products run once for all of them.

    Args:
        matrices: stacks [b, rows, cols] with equal ``min(rows, cols)``, dtype and device, normalised; not modified.
        restarts: steps (0-based, at least 1) before which Q is applied and R formed anew.

    Returns:
        The stacks and the last Q, [B, N, N]: ``Q X`` of each stack is its result.
    """
    longs, r = _stack(matrices)
    last, q = len(coefficients) - 1, None
    for step, (a, b, c) in enumerate(coefficients):
        if step == 0 or step in restarts:
            for long in longs:
                if q is not None:
                    long.multiply(q, kernel)
                long.gram(kernel, r, "gram")
            q = None
        z = kernel.symmetric(r, r.mT, r, alpha=c, beta=b)
        if step < last and step + 1 not in restarts:
            rh = kernel.symmetric(z, r.mT, r, beta=a)
            r_next = kernel.symmetric(rh, z.mT, rh, beta=a)
        else:
            r_next = r
        q = kernel.add_identity(z, a) if q is None else kernel.symmetric(z, q.mT, q, beta=a)
        r = r_next
    assert q is not None, "no steps"
    return longs, q


def direct_iteration(
    matrices: Sequence[Tensor], coefficients: Sequence[Triple], kernel: SymmetricKernel
) -> tuple[list[Long], Tensor]:
    """Iterate by the classic form, ``X <- (a I + b A + c A^2) X`` with ``A = X X^T``.

    Takes and returns what the Gram form does, but stacks in bfloat16 are written to, and ``factor X`` is to be added to
    their last product.
    """
    longs, gram = _stack(matrices)
    if gram.dtype == torch.bfloat16:
        return longs, _iterate_in_bfloat16(longs, gram, coefficients, kernel)
    z, last = gram, len(coefficients) - 1
    for step, (a, b, c) in enumerate(coefficients):
        for long in longs:
            long.gram(kernel, gram, "direct")
        z = kernel.symmetric(gram, gram.mT, gram, alpha=c, beta=b, algorithm="direct")
        if step < last and all(kernel.adds_at_once(*long.operands(z)) for long in longs):
            for long in longs:
                long.x = kernel.rectangular_plus(*long.operands(z), long.x, a)
            continue
        z = kernel.add_identity(z, a)
        for long in longs if step < last else ():
            long.multiply(z, kernel)
    return longs, z


def _iterate_in_bfloat16(
    longs: Sequence[Long], gram: Tensor, coefficients: Sequence[Triple], kernel: SymmetricKernel
) -> Tensor:
    """Do the direct form with each ``a X`` added in the accumulator, the last one left to the last product.

    Only CPUs come here. X goes to and fro between the stack that was given and another one, since what stays in a cache
    is faster (6 % at a side of 256), and fresh memory costs a page fault every 4 KiB (5 % at 512).
    """
    z, last = torch.empty_like(gram), len(coefficients) - 1
    for step, (a, b, c) in enumerate(coefficients):
        for long in longs:
            long.gram(kernel, gram, "direct")
        kernel.symmetric(gram, gram, gram, alpha=c, beta=b, out=z, algorithm="direct")
        for long in longs:
            if step < last:
                x = kernel.rectangular_plus(*long.operands(z), long.x, a, long.spare)
                long.x, long.spare = x, long.x
            else:
                long.factor = a
    return z
