"""Which tile of quack's symmetric GEMM suits a product, by its size.

quack takes one tile for everything on SM90 (128 x 256 in clusters of 2 x 1). Measured on an H200 (microseconds in a
CUDA graph, `benchmarks/results/symmetric_product-nvidia-h200.json`), the best of these tiles is up to 2.7 times faster
for one small matrix and 1.5 times for one of 4096.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["TILES", "Product", "Tile", "candidate_tiles", "decide_tile"]


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
TILES: Final[Mapping[str, Tile]] = {"small": SMALL, "flat": FLAT, "ping_pong": PING_PONG, "large": LARGE}
"""By the names under which choices are kept."""

FEW_TILES: Final = 40
"""Up to this many tiles of 128 x 128, most of an H200's 132 multiprocessors would idle: smaller tiles win."""


LONG_SUM: Final = 12_000
"""From this inner dimension on, and with enough tiles, the larger tile's fewer loads win."""


@dataclass(frozen=True, slots=True)
class Product:
    """``num_matrices`` products [short_dim, inner_dim] x [inner_dim, short_dim], with or without an added matrix.

    ``contiguous`` says that the operands are contiguous along the inner dimension. Where they are not, the compiler
    ends the process on some tiles, so only the two that are known to compile are used.
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
        rows = -(-self.short_dim // 128)
        return self.num_matrices * rows * (rows + 1) // 2


def decide_tile(product: Product, choices: Mapping[str, str]) -> Tile:
    """Return the tile that ``choices`` name for the class of ``product``, else the one of the static rule."""
    chosen = choices.get(product.key)
    if chosen in candidate_tiles(product):
        return TILES[chosen]
    if product.num_tiles <= FEW_TILES:
        return FLAT if product.short_dim >= 1024 and product.contiguous else SMALL
    large = product.inner_dim >= LONG_SUM and product.short_dim >= 4096 and product.contiguous
    return LARGE if large else PING_PONG


def candidate_tiles(product: Product) -> tuple[str, ...]:
    """Return the names of tiles that may win and are known to compile for this layout."""
    names = []
    if product.num_tiles <= 4 * FEW_TILES:
        names.append("small")
        if product.contiguous:
            names.append("flat")
    if product.num_tiles > FEW_TILES // 4:
        names.append("ping_pong")
    if product.contiguous and not product.with_c and product.num_tiles > 4 * FEW_TILES:
        names.append("large")
    return tuple(names)
