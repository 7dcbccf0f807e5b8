"""Holds our fused passes to plain torch in Triton's interpreter, on a CPU: run it with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from dmuon_runtime import _elementwise_triton, _updates_triton, adamw, updates
from dmuon_runtime._elementwise import normalized
from dmuon_runtime.adamw import AdamWSettings, AdamWTensors

SIZES = (1, 0, 16, 4095, 4096, 4096, 8192, 8192, 4097, 7, 10_001)
"""Around the edges of a block, with and without alignment, and one without elements."""
MIXES = (
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16),
)  # fmt: skip
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}
GATES = (None, torch.ones(()), torch.zeros(()))


def _tensors(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One for each size, every second one off every alignment, so that a call is more than one launch."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(size + 1, generator=generator).to(dtype) for size in SIZES]
    return [
        x[1 : 1 + size] if place % 2 else x[:size] for place, (x, size) in enumerate(zip(found, SIZES, strict=True))
    ]


def _close(found: Tensor, expected: Tensor, *dtypes: torch.dtype) -> None:
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def _momentum() -> None:
    for (m, g), gate, nesterov in itertools.product(MIXES, GATES, (True, False)):
        buffers, gradients = _tensors(m, 0), _tensors(g, 1)
        if gate is not None and gate == 0:
            gradients = [torch.full_like(x, math.nan) for x in gradients]
        before = [x.clone() for x in buffers]
        plain = [x.clone() for x in buffers]
        aheads = _updates_triton.momentum(buffers, gradients, 0.95, nesterov, gate)
        for start, mine, ahead, other, gradient in zip(before, buffers, aheads, plain, gradients, strict=True):
            [expected] = updates.momentum_updates([other], [gradient], 0.95, nesterov, gate)
            assert ahead.dtype == expected.dtype and (nesterov or ahead is mine)
            _close(mine, other, m)
            _close(ahead, expected, m, g)
            assert gate is None or gate > 0 or torch.equal(mine, start)


def _changes() -> None:
    for (w, d), gate in itertools.product(MIXES, GATES):
        weights, directions = _tensors(w, 2), _tensors(d, 3)
        if gate is not None and gate == 0:
            directions = [torch.full_like(x, math.inf) for x in directions]
        before = [x.clone() for x in weights]
        plain = [x.clone() for x in weights]
        scales = [0.2 * (1 + place) for place in range(len(SIZES))]
        found = _updates_triton.apply_changes(weights, directions, scales, -0.02, 0.99, gate)
        for start, mine, other, direction, scale, squares in zip(
            before, weights, plain, directions, scales, found, strict=True
        ):
            [expected] = updates.apply_changes([other], [direction.float()], [scale], 0.02, 0.01, gate)
            _close(mine, other, w)
            torch.testing.assert_close(squares.double().sum(), expected, rtol=1e-5, atol=0)
            assert gate is None or gate > 0 or (torch.equal(mine, start) and squares.sum() == 0)


def _adamw() -> None:
    settings = AdamWSettings(3e-3, (0.9, 0.999), 1e-8, 0.1)
    for (state, g), gate in itertools.product(MIXES, GATES):
        columns = [_tensors(torch.float32, 4), _tensors(g, 5), _tensors(state, 6)]
        columns += [[x.abs() for x in _tensors(state, 7)], [torch.full((), float(n)) for n, _ in enumerate(SIZES, 1)]]
        mine, plain = ([[x.clone() for x in column] for column in columns] for _ in range(2))
        counted = 1.0 if gate is None else float(gate)
        plain[4] = [step - counted for step in plain[4]]  # plain torch counts the step itself
        found = _updates_triton.adamw(mine, gate, lr=3e-3, betas=settings.betas, eps=1e-8, keep=1 - 3e-4)
        expected = adamw.adamw_update(AdamWTensors(*plain), settings, gate)
        for place in (2, 3):
            for one, other in zip(mine[place], plain[place], strict=True):
                _close(one, other, state)
        for start, one, other, squares, theirs in zip(columns[0], mine[0], plain[0], found, expected, strict=True):
            torch.testing.assert_close(one - start, other - start, rtol=TOLERANCE[state], atol=6e-5)
            torch.testing.assert_close(
                squares.double().sum(), theirs, rtol=5e-2 if state != torch.float32 else 1e-5, atol=0
            )
            assert gate is None or gate > 0 or torch.equal(one, start)


SHAPES = ((1, 3, 5), (2, 129, 257), (1, 64, 128), (3, 1, 8193), (300, 4, 4), (1, 1, 2_100_000))
"""One and several programs a matrix, one that takes more than a block each, and many small matrices."""


def _normalisation() -> None:
    generator = torch.Generator().manual_seed(8)
    for dtype, out_dtype in ((torch.float32, torch.float16), (torch.bfloat16, torch.float32)):
        given = [torch.randn(shape, generator=generator) for shape in SHAPES]
        extremes = torch.randn(9, 40, 250, generator=generator)
        for place, scale in enumerate((1e-30, 1e-32, 1e-20, 1e20, 1e30, 0.0, 1.0)):
            extremes[place] *= scale
        extremes[7, 1, 2], extremes[8, 39, 249] = math.nan, -math.inf
        tensors = [x.to(dtype) for x in (*given, extremes)]
        outs = [torch.empty(x.shape, dtype=out_dtype) for x in tensors]
        _elementwise_triton.normalize(tensors, outs)
        for g, out in zip(tensors, outs, strict=True):
            expected = normalized(g.double()).to(out_dtype)
            tolerance = 2 * max(torch.finfo(out_dtype).eps, 1e-6)
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=1e-7, equal_nan=True)
        assert (outs[-1][5] == 0).all() and outs[-1][7:].isnan().all() and outs[-1][:7].isfinite().all()


if __name__ == "__main__":
    _momentum()
    _changes()
    _adamw()
    _normalisation()
    print("all alike")
