"""Tiles of the symmetric product against cuBLAS and quack's own tile, interleaved, microseconds in a CUDA graph.

    python -m benchmarks.tiles

The product is ``0.5 A + 0.5 A A`` for square and ``X X^T`` for wide matrices, float16. Every candidate is checked
against cuBLAS before it is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import print_table, write_result
from dmuon_runtime._ns_measure import milliseconds
from dmuon_runtime.kernels import KERNELS, _tiles, syrk_quack
from dmuon_runtime.kernels._tiles import TILES, Tile, candidate_tiles, decide_tile
from dmuon_runtime.ledger import LEDGER

__all__ = ["main"]

CASES = (
    (1, 512, 512), (16, 512, 512), (1, 1024, 1024), (8, 1024, 1024), (1, 2048, 2048), (4, 2048, 2048), (8, 2048, 2048),
    (1, 4096, 4096), (2, 4096, 4096), (1, 1024, 4096), (24, 768, 3072), (1, 2048, 8192), (1, 4096, 14336),
)  # fmt: skip
OWN_TILE = Tile(128, 256, cluster_m=2)
"""What quack takes on SM90."""
MAX_ERROR = 1e-2


def run_case(number: int, short_dim: int, long_dim: int) -> dict[str, Any]:
    """Time one product by every tile that may compute it; return its row."""
    x = torch.randn(number, short_dim, long_dim, device="cuda", dtype=torch.float16) / long_dim**0.5
    c = (x + x.mT) / 4 if short_dim == long_dim else None
    left = x if c is None else c
    out = torch.empty(number, short_dim, short_dim, device="cuda", dtype=torch.float16)
    alpha = beta = 0.5 if c is not None else 1.0
    product = syrk_quack.product_of(left, left.mT, c)
    expected = KERNELS["cublas"].symmetric(left, left.mT, c, alpha=alpha, beta=beta)

    def launch(kernel: Any) -> Callable[[], object]:
        return lambda: kernel.symmetric(left, left.mT, c, alpha=alpha, beta=beta, out=out)

    calls = {"cublas": launch(KERNELS["cublas"])}
    for name in (*candidate_tiles(product), "quack's own"):
        calls[name] = _of_tile(launch(KERNELS["quack"]), OWN_TILE if name == "quack's own" else TILES[name])
        calls[name]()
        error = float((out.float() - expected.float()).norm() / expected.float().norm())
        assert error < MAX_ERROR, f"{name} is wrong on {product}: {error:.1e}"
    repeat = max(1, min(16, int(2e11 / (2.0 * number * short_dim**2 * long_dim))))
    times = {name: value * 1e3 for name, value in milliseconds(calls, x.device, repeat).items()}
    usual = next(name for name in TILES if TILES[name] == decide_tile(product, {}))
    return {"case": f"{number}x{short_dim}x{long_dim}", "rule": usual, **times}


def _of_tile(call: Callable[[], object], tile: Tile) -> Callable[[], object]:
    """Let ``call`` take ``tile``, whatever the rules say."""

    def run() -> object:
        before, syrk_quack.decide_tile = syrk_quack.decide_tile, lambda product, choices: tile
        try:
            return call()
        finally:
            syrk_quack.decide_tile = before

    return run


def main(arguments: list[str]) -> int:
    """Run, print, write; return the exit status."""
    if arguments or not torch.cuda.is_available():
        print(__doc__ if arguments else "needs a CUDA device with quack-kernels", file=sys.stderr)
        return 2
    with LEDGER.muted():
        rows = [run_case(*case) for case in CASES]
    header = ["case", "rule", "cublas", "quack's own", *_tiles.TILES]
    print_table(header, [[row.get(name, "") for name in header] for row in rows])
    write_result("tiles", rows, unit="microseconds, median")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
