"""Seconds to compile the symmetric products, one process a tile, all at once; their cache serves what comes after.

python -m benchmarks.ns_compile
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch

from benchmarks.common import print_table
from dmuon_runtime.kernels import KERNELS
from dmuon_runtime.kernels._tiles import TILES, candidate_tiles
from dmuon_runtime.kernels.syrk_quack import product_of
from dmuon_runtime.ledger import LEDGER

__all__ = ["compile_tile", "main"]


def compile_tile(tile: str) -> dict[str, float]:
    """Launch one product of each kind for which ``tile`` is a candidate; return the seconds of each first launch."""
    n = 4096 if tile == "large" else 2048
    x = torch.zeros(1, n, n, device="cuda", dtype=torch.float16)
    seconds: dict[str, float] = {}
    for rows, with_c, alpha, beta in ((True, False, 1.0, 1.0), (True, True, 0.5, 0.5), (True, True, 1.0, 0.5),
                                      (False, False, 1.0, 1.0)):  # fmt: skip
        left, c = (x if rows else x.mT), (x if with_c else None)
        product = product_of(left, left.mT, c)
        if tile in candidate_tiles(product):
            begin = time.perf_counter()
            with LEDGER.muted():
                kernel = KERNELS["quack"].tuned({product.key: tile})
                kernel.symmetric(left, left.mT, c, alpha=alpha, beta=beta)
            torch.cuda.synchronize()
            seconds[f"{'rows' if rows else 'columns'}{', added' if with_c else ''}, {alpha}"] = (
                time.perf_counter() - begin
            )
    return seconds


def main(arguments: list[str]) -> int:
    """Compile the tile that is named, or start a process for each; return the exit status."""
    if arguments:
        print(json.dumps(compile_tile(arguments[0])))
        return 0
    if not torch.cuda.is_available() or not KERNELS["quack"].available(torch.device("cuda", 0))[0]:
        print("nothing to compile: quack does not run here")
        return 0
    begin = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.ns_compile"]
    running = {tile: subprocess.Popen([*command, tile], stdout=subprocess.PIPE, text=True) for tile in TILES}
    rows: list[tuple[str, str, float]] = []
    for tile, process in running.items():
        output, _ = process.communicate()
        if process.returncode:
            rows.append((tile, f"exit status {process.returncode}", float("nan")))
        else:
            rows += [(tile, kind, seconds) for kind, seconds in json.loads(output.splitlines()[-1]).items()]
    print_table(["tile", "product", "seconds"], rows)
    print(f"all at once: {time.perf_counter() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
