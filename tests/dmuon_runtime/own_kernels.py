"""Launches each of our own kernels on awkward sizes, for a sanitizer to watch."""

from __future__ import annotations

import torch

from dmuon_runtime import _elementwise_triton, _updates_triton
from dmuon_runtime.kernels._triton_symmetric import symmetric_product


def _elementwise() -> None:
    for shape in ((1, 3, 5), (2, 129, 257), (1, 1, 70_001)):
        g = torch.randn(shape, device="cuda")
        out = torch.empty(shape, device="cuda", dtype=torch.float16)
        _elementwise_triton.normalize([g, g], [out, torch.empty_like(out)])
        _elementwise_triton.cast(out, torch.bfloat16)
        _elementwise_triton.add_identity(torch.randn(shape[0], shape[1], shape[1], device="cuda"), 0.5)


def _updates() -> None:
    sizes = (1, 4095, 4096, 4097, 70_001)
    for offset in (0, 1):  # on and off alignment
        w, g, m, v = ([torch.randn(size + offset, device="cuda")[offset:].abs() for size in sizes] for _ in range(4))
        steps = [torch.ones((), device="cuda") for _ in sizes]
        for gate in (None, torch.zeros((), device="cuda"), torch.ones((), device="cuda")):
            _updates_triton.momentum(m, g, 0.9, True, gate)
            _updates_triton.apply_changes(w, g, [1.0] * len(sizes), -0.1, 0.99, gate)
            _updates_triton.adamw((w, g, m, v, steps), gate, lr=0.1, betas=(0.9, 0.99), eps=1e-8, keep=0.99)


def _symmetric() -> None:
    for batch, n, k in ((1, 129, 65), (3, 264, 136), (2, 1030, 96)):
        x = torch.randn(batch, n, k, device="cuda", dtype=torch.float16)
        c, out = (torch.zeros(batch, n, n, device="cuda", dtype=torch.float16) for _ in range(2))
        symmetric_product(x, x, None, 1.0, 0.0, out)
        symmetric_product(x, x, c, 0.5, 0.5, out)


if __name__ == "__main__":
    torch.manual_seed(0)
    _elementwise()
    _updates()
    _symmetric()
    torch.cuda.synchronize()
    print("all launched")
