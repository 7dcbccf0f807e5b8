"""Newton-Schulz against torch.optim.Muon's, interleaved in one process, each result checked against fp64.

python -m benchmarks.newton_schulz            the shapes that suit this machine's device
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import _muon

import dmuon_runtime as dmuon
from benchmarks.common import interleaved_ms, print_table, write_result

__all__ = ["main"]

CPU_SHAPES = (
    (1, 256, 256),
    (1, 512, 512),
    (1, 1024, 1024),
    (1, 2048, 2048),
    (8, 256, 256),
    (8, 512, 512),
    (4, 256, 1024),
)
GPU_SHAPES = (
    (1, 512, 512), (1, 1024, 1024), (1, 1024, 4096), (1, 2048, 2048), (1, 2048, 8192), (1, 4096, 4096),
    (1, 4096, 14336), (1, 14336, 4096), (64, 512, 512), (32, 1024, 1024), (24, 768, 3072), (8, 2048, 2048),
)  # fmt: skip
KELLER_JORDAN = (3.4445, -4.7750, 2.0315)


def torch_muon(matrices: list[Tensor]) -> list[Tensor]:
    """The rival: torch.optim.Muon's own function, one matrix after the other as its step does."""
    return [_muon._zeropower_via_newtonschulz(g, KELLER_JORDAN, 5, 1e-7) for g in matrices]


def band(update: Tensor) -> tuple[float, float]:
    """Smallest and largest singular value of ``update`` [M, N], in fp64."""
    values = torch.linalg.svdvals(update.double())
    return float(values.min()), float(values.max())


def contestants(matrices: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Name to call; every call orthogonalises all of ``matrices``."""
    found: dict[str, Callable[[], object]] = {"torch.optim.Muon": lambda: torch_muon(matrices)}
    for backend in ("gram", "direct"):
        ns = dmuon.NewtonSchulz(backend)
        found[f"ours {backend}"] = lambda ns=ns: ns.orthogonalize(matrices, 5)
    return found


def main(arguments: list[str]) -> int:
    """Run, print, write; return the exit status."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    for batch, rows_, cols in shapes:
        torch.manual_seed(rows_ + cols)
        matrices = [torch.randn(rows_, cols, device=device, dtype=dtype) for _ in range(batch)]
        calls = contestants(matrices)
        times = interleaved_ms(calls, rounds=7 if device == "cpu" else 30)
        low, high = band(dmuon.NewtonSchulz("gram").orthogonalize(matrices[:1], 5)[0])
        best = min(time for name, time in times.items() if name.startswith("ours"))
        rows.append(
            {"shape": f"{batch}x{rows_}x{cols}", **times, "ratio": best / times["torch.optim.Muon"],
             "smallest_sv": low, "largest_sv": high}
        )  # fmt: skip
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    write_result("newton_schulz", rows, unit="milliseconds, median", input_dtype=str(dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
