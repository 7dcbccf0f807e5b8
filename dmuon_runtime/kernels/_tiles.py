"""Which tile of quack's symmetric GEMM suits a product, by its size.

quack takes one tile for everything on SM90 (128 x 256 in clusters of 2 x 1). Measured on an H200 (microseconds in a
CUDA graph, `benchmarks/results/symmetric_product-nvidia-h200.json`), the best of these tiles is up to 2.7 times faster
for one small matrix and 1.5 times for one of 4096.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["TILES", "Tile", "decide_tile"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of the GEMM. ``tile_m * cluster_m`` equals ``tile_n * cluster_n``, or the result is wrong."""

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    ping_pong: bool = False

    def __post_init__(self) -> None:
        rows, cols = self.tile_m * self.cluster_m, self.tile_n * self.cluster_n
        if rows != cols:
            raise ValueError(f"a cluster must cover a square of a symmetric product, found {rows} x {cols}")


SMALL: Final = Tile(64, 64)
FLAT: Final = Tile(64, 128, cluster_m=2, ping_pong=True)
PING_PONG: Final = Tile(128, 128, ping_pong=True)
LARGE: Final = Tile(192, 192)
TILES: Final = (SMALL, FLAT, PING_PONG, LARGE)

FEW_TILES: Final = 40
"""Up to this many tiles of 128 x 128, most of an H200's 132 multiprocessors would idle: smaller tiles win."""


LONG_SUM: Final = 12_000
"""From this inner dimension on, and with enough tiles, the larger tile's fewer loads win."""


def decide_tile(num_matrices: int, short_dim: int, inner_dim: int, *, contiguous: bool) -> Tile:
    """Return the tile for ``num_matrices`` products [short_dim, inner_dim] x [inner_dim, short_dim].

    ``contiguous`` says that the operands are contiguous along the inner dimension. Where they are not, the compiler
    ends the process on some tiles, so only the two that are known to compile are used.
    """
    rows = -(-short_dim // 128)
    num_tiles = num_matrices * rows * (rows + 1) // 2
    if num_tiles <= FEW_TILES:
        return FLAT if short_dim >= 1024 and contiguous else SMALL
    return LARGE if inner_dim >= LONG_SUM and short_dim >= 4096 and contiguous else PING_PONG
