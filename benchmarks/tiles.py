"""Tiles of quack's GEMMs against cuBLAS and quack's own tile, interleaved, microseconds in a CUDA graph.

    python -m benchmarks.tiles

The symmetric product is ``0.5 A + 0.5 A A`` for square and ``X X^T`` for wide matrices, float16; the plain one is the
direct form's ``Z X + 0.5 X``, for which cuBLAS needs a pass over the diagonal of Z first. Every candidate is checked
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
PLAIN_CASES = (
    (1, 512, 512), (4, 512, 512), (64, 512, 512), (1, 1024, 1024), (2, 1024, 1024), (32, 1024, 1024), (1, 2048, 2048),
    (2, 2048, 2048), (8, 2048, 2048), (1, 4096, 4096), (4, 4096, 4096),
)  # fmt: skip
"""Matrices, rows and columns of X: those that take the direct form are nearly square."""
PLAIN_TILES = {
    "small": _tiles.SMALL_PLAIN, "flat": _tiles.FLAT_PLAIN, "ping_pong": _tiles.PING_PONG,
    "wide": Tile(128, 192, cluster_m=2, ping_pong=True, square=False),
}  # fmt: skip
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
        tile = OWN_TILE if name == "quack's own" else TILES[name]
        calls[name] = _of_tile(launch(KERNELS["quack"]), "decide_tile", tile)
        calls[name]()
        error = float((out.float() - expected.float()).norm() / expected.float().norm())
        assert error < MAX_ERROR, f"{name} is wrong on {product}: {error:.1e}"
    repeat = max(1, min(16, int(2e11 / (2.0 * number * short_dim**2 * long_dim))))
    times = {name: value * 1e3 for name, value in milliseconds(calls, x.device, repeat).items()}
    usual = next(name for name in TILES if TILES[name] == decide_tile(product, {}))
    return {"case": f"{number}x{short_dim}x{long_dim}", "rule": usual, **times}


def run_plain_case(number: int, rows: int, columns: int) -> dict[str, Any]:
    """Time the direct form's plain product by cuBLAS and by every tile; return its row."""
    x = torch.randn(number, rows, columns, device="cuda", dtype=torch.float16)
    z = torch.randn(number, rows, rows, device="cuda", dtype=torch.float16) / rows**0.5
    z = (z + z.mT) / 2
    quack = KERNELS["quack"]
    expected = z.float() @ x.float() + 0.5 * x.float()
    # adding nothing takes as long, and leaves Z as it is for the next call
    calls: dict[str, Callable[[], object]] = {"cublas": lambda: torch.bmm(quack.add_identity(z, 0.0), x)}
    for name, tile in PLAIN_TILES.items():
        calls[name] = _of_tile(lambda: quack.rectangular_plus(z, x, x, 0.5), "decide_plain_tile", tile)
        found = calls[name]()
        assert isinstance(found, torch.Tensor)
        error = float((found.float() - expected).norm() / expected.norm())
        assert error < MAX_ERROR, f"{name} is wrong on {number}x{rows}x{columns}: {error:.1e}"
    repeat = max(1, min(16, int(2e11 / (2.0 * number * rows**2 * columns))))
    times = {name: value * 1e3 for name, value in milliseconds(calls, x.device, repeat).items()}
    chosen = _tiles.decide_plain_tile(number, rows, columns)
    rule = next((name for name, tile in PLAIN_TILES.items() if tile == chosen), "cublas")
    return {"case": f"plain {number}x{rows}x{columns}", "rule": rule, **times}


def _of_tile(call: Callable[[], object], rule: str, tile: Tile) -> Callable[[], object]:
    """Let ``call`` take ``tile``, whatever the ``rule`` of quack's adapter says."""

    def run() -> object:
        before = getattr(syrk_quack, rule)
        setattr(syrk_quack, rule, lambda *_: tile)
        try:
            return call()
        finally:
            setattr(syrk_quack, rule, before)

    return run


def main(arguments: list[str]) -> int:
    """Run, print, write; return the exit status."""
    if arguments or not torch.cuda.is_available():
        print(__doc__ if arguments else "needs a CUDA device with quack-kernels", file=sys.stderr)
        return 2
    with LEDGER.muted():
        rows = [run_case(*case) for case in CASES]
        plain = [run_plain_case(*case) for case in PLAIN_CASES]
    for found, tiles in ((rows, ["quack's own", *_tiles.TILES]), (plain, list(PLAIN_TILES))):
        header = ["case", "rule", "cublas", *tiles]
        print_table(header, [[row.get(name, "") for name in header] for row in found])
    write_result("tiles", rows + plain, unit="microseconds, median")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
