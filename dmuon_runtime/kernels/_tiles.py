"""Which tile of quack's GEMMs suits a product, by its size.

quack takes one tile for every symmetric product on SM90 (128 x 256 in clusters of 2 x 1). Measured on an H200
(`python -m benchmarks.tiles`, microseconds in a CUDA graph), the best of these tiles is up to 2.8 times faster for
one small matrix and 1.3 times for one of 2048 or 4096.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

__all__ = ["TILES", "Product", "Tile", "candidate_tiles", "decide_plain_tile", "decide_tile", "matrices_that_fill"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration of the GEMM; that of a symmetric product covers ``square`` clusters, or the result is wrong."""

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    ping_pong: bool = False
    square: bool = True

    def __post_init__(self) -> None:
        rows, cols = self.tile_m * self.cluster_m, self.tile_n * self.cluster_n
        if self.square and rows != cols:
            raise ValueError(f"a cluster must cover a square of a symmetric product, found {rows} x {cols}")


SMALL: Final = Tile(64, 64)
FLAT: Final = Tile(128, 64, cluster_n=2, ping_pong=True)
PING_PONG: Final = Tile(128, 128, ping_pong=True)
OBLONG: Final = Tile(192, 96, cluster_n=2, ping_pong=True)
LARGE: Final = Tile(192, 192)
TILES: Final[Mapping[str, Tile]] = {
    "small": SMALL, "flat": FLAT, "ping_pong": PING_PONG, "oblong": OBLONG, "large": LARGE
}  # fmt: skip
"""By the names under which choices are kept."""

NUM_MULTIPROCESSORS: Final = 132
"""Of the H100 and H200 for which the rules were measured."""
FEW_TILES: Final = 40
"""Up to this many tiles of 128 x 128, most multiprocessors would idle: smaller tiles win."""


@dataclass(frozen=True, slots=True)
class Product:
    """``num_matrices`` products [short_dim, inner_dim] x [inner_dim, short_dim], with or without an added matrix.

    ``contiguous`` says that the operands are contiguous along the inner dimension. Where they are not, the compiler
    ends the process on the large tile.
    """

    num_matrices: int
    short_dim: int
    inner_dim: int
    contiguous: bool
    with_c: bool
    dtype: str

    @property
    def key(self) -> str:
        """Name of its class: the number of matrices counts by the next power of two."""
        layout = ("rows" if self.contiguous else "columns") + ("+c" if self.with_c else "")
        bucket = 1 << (self.num_matrices - 1).bit_length()
        return f"tile/{bucket}/{self.short_dim}/{self.inner_dim}/{layout}/{self.dtype}"

    @property
    def num_tiles(self) -> int:
        """Tiles of 128 x 128 on or below the diagonals."""
        return self._num_triangle(128)

    def _num_triangle(self, side: int) -> int:
        rows = -(-self.short_dim // side)
        return self.num_matrices * rows * (rows + 1) // 2

    @property
    def fills_oblong(self) -> bool:
        """True where :data:`OBLONG`, at 9/8 of the work of a 128 x 128 tile, needs so few waves that it is faster."""
        waves, oblong_waves = (
            -(-count // NUM_MULTIPROCESSORS) for count in (self.num_tiles, 2 * self._num_triangle(192))
        )
        return 9 * oblong_waves < 8 * waves


def decide_tile(product: Product, choices: Mapping[str, str]) -> Tile:
    """Return the tile that ``choices`` name for the class of ``product``, else the one of the static rule."""
    chosen = choices.get(product.key)
    if chosen in candidate_tiles(product):
        return TILES[chosen]
    if product.num_tiles <= FEW_TILES:
        return FLAT if product.short_dim >= 1024 else SMALL
    return OBLONG if product.fills_oblong else PING_PONG


def candidate_tiles(product: Product) -> tuple[str, ...]:
    """Return the names of tiles that may win and are known to compile for this layout."""
    names = []
    if product.num_tiles <= 4 * FEW_TILES:
        names += ["small", "flat"]
    if product.num_tiles > FEW_TILES // 4:
        names.append("ping_pong")
    if product.fills_oblong:
        names.append("oblong")
    if product.contiguous and not product.with_c and product.num_tiles > 4 * FEW_TILES:
        names.append("large")
    return tuple(names)


FULL_WAVES: Final = 0.95
"""Share of the multiprocessors that work, over the waves of a product, from which more matrices gain nothing."""
FULL_SIDE: Final = 4096
"""One product of this size fills an H100 or H200, and a round of smaller ones is as much work at least."""


@lru_cache(maxsize=1024)
def matrices_that_fill(short_dim: int) -> int:
    """Return how many matrices, multiplied together, keep the device busy; 1 from about 4096 on.

    Measured on an H200 (milliseconds of Newton-Schulz): 20 matrices of 4096 take 66 one by one, 67 in pairs and 72
    at once; 112 of 2048 take 50 by fours, 46 by 16 and 51 at once. Beyond what fills it, operands only leave the cache.
    """
    rows = -(-short_dim // 128)
    tiles = rows * (rows + 1) // 2
    least = -(-(FULL_SIDE**3) // short_dim**3)
    shares = ((k, k * tiles / NUM_MULTIPROCESSORS) for k in range(least, least + NUM_MULTIPROCESSORS))
    return next(k for k, waves in shares if waves / math.ceil(waves) >= FULL_WAVES)


SMALL_PLAIN: Final = Tile(64, 64, square=False)
FLAT_PLAIN: Final = Tile(64, 128, ping_pong=True, square=False)


def decide_plain_tile(num_matrices: int, rows: int, cols: int) -> Tile | None:
    """Return the tile for ``A B + beta C``, or None where cuBLAS and a pass over the diagonal are faster.

    Measured on an H200 (`python -m benchmarks.tiles`): up to a third faster for one small matrix, 4 to 8 % up to two
    waves of tiles; beyond them no tile is faster than cuBLAS by more than 2 %.
    """
    num_tiles = num_matrices * -(-rows // 128) * -(-cols // 128)
    if num_tiles <= 80:
        return SMALL_PLAIN if num_tiles <= 20 else FLAT_PLAIN
    return PING_PONG if num_tiles <= 2 * NUM_MULTIPROCESSORS else None
