"""Newton-Schulz against its peers, interleaved in one process, every result checked against fp64.

    python -m benchmarks.newton_schulz [--quick]

On a GPU: torch.optim.Muon's function, gram-newton-schulz (eager and compiled, where it is importable) and ours, on
single matrices, batches and mixed groups of one short side. On a CPU: torch.optim.Muon's function and ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

import dmuon_runtime as dmuon
from benchmarks.common import interleaved_ms, print_table, write_result
from dmuon_runtime._ns_iterations import ns_flops

__all__ = ["main"]

Shape = tuple[int, int, int]
CPU_CASES: tuple[tuple[Shape, ...], ...] = (
    ((1, 256, 256),), ((1, 512, 512),), ((1, 1024, 1024),), ((1, 2048, 2048),), ((8, 256, 256),), ((8, 512, 512),),
    ((4, 256, 1024),),
)  # fmt: skip
GPU_CASES: tuple[tuple[Shape, ...], ...] = (
    ((1, 512, 512),), ((1, 1024, 1024),), ((1, 1024, 4096),), ((1, 2048, 2048),), ((1, 2048, 8192),),
    ((1, 4096, 4096),), ((1, 4096, 14336),), ((1, 14336, 4096),), ((64, 512, 512),), ((32, 1024, 1024),),
    ((24, 768, 3072),), ((8, 2048, 2048),),
    ((2, 4096, 4096), (3, 4096, 14336)), ((4, 2048, 2048), (3, 2048, 8192)), ((16, 2048, 2048), (12, 2048, 8192)),
    ((8, 1024, 1024), (8, 1024, 4096)),
)  # fmt: skip
KELLER_JORDAN = (3.4445, -4.7750, 2.0315)
SLOW_LOOP = 8
"""torch.optim.Muon loops over matrices: batches of this size or more are timed with fewer rounds."""


def torch_muon(stacks: Sequence[Tensor]) -> list[Tensor]:
    """The first rival: torch.optim.Muon's own function, one matrix after the other as its step does."""
    return [_muon._zeropower_via_newtonschulz(g, KELLER_JORDAN, 5, 1e-7) for stack in stacks for g in stack]


def gram_newton_schulz(**settings: Any) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
    """The second rival, batched by shape; None where it is not importable."""
    if importlib.util.find_spec("gram_newton_schulz") is None or not torch.cuda.is_available():
        return None
    function = importlib.import_module("gram_newton_schulz").GramNewtonSchulz(**settings)
    return lambda stacks: [function(stack) for stack in stacks]


def contestants(stacks: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    """Name to a call that orthogonalises all of ``stacks``, each [B, M, N]."""
    found: dict[str, Callable[[], object]] = {"torch": lambda: torch_muon(stacks)}
    eager, compiled = gram_newton_schulz(compile_kwargs=None), gram_newton_schulz()
    if eager and compiled:
        found |= {"gns eager": lambda: eager(stacks), "gns compiled": lambda: compiled(stacks)}
    for backend in ("gram", "direct"):
        ns = dmuon.NewtonSchulz(backend)
        found[f"ours {backend}"] = lambda ns=ns: ns.orthogonalize(stacks, 5)
    return found


def error_against_fp64(stack: Tensor) -> float:
    """Relative Frobenius error of ours on the first matrix of ``stack``, against the same polynomial in fp64."""
    ns = dmuon.NewtonSchulz("gram")
    coefficients, _ = ns.plan(5)
    x = stack[0].double()
    x = x / x.norm()
    x = x.mT if x.shape[0] > x.shape[1] else x
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    ours = ns.orthogonalize([stack], 5)[0][0].double()
    ours = ours.mT if stack.shape[1] > stack.shape[2] else ours
    return float((ours - x).norm() / x.norm())


def ceiling_tflops(dtype: torch.dtype) -> float:
    """TFLOP/s of a plain matrix product here and now: 8192^3 on a GPU, 1024^3 on a CPU."""
    n = 8192 if torch.cuda.is_available() else 1024
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / interleaved_ms({"product": lambda: x @ x}, rounds=10)["product"] / 1e9


def ideal_ms(case: Sequence[Shape], tflops: float) -> float:
    """Milliseconds of the cheaper form at the ceiling, symmetric products at half."""
    flops = sum(
        batch * min(ns_flops(form, *sorted(shape), 5, 1) for form in ("gram", "direct"))  # type: ignore[misc]
        for batch, *shape in case
    )
    return flops / tflops / 1e9


def run_case(case: Sequence[Shape], rounds: int, tflops: float) -> dict[str, Any]:
    """Time one case; return its row."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(sum(map(sum, case)))
    stacks = [torch.randn(shape, device=device, dtype=dtype) for shape in case]
    calls = contestants(stacks)
    begin = time.perf_counter()
    calls["ours gram"]()
    if device == "cuda":
        torch.cuda.synchronize()
    first_s = time.perf_counter() - begin
    times = interleaved_ms(calls, rounds=rounds, warmup=3)
    ours = min(times["ours gram"], times["ours direct"])
    peer = min(value for name, value in times.items() if not name.startswith("ours"))
    row: dict[str, Any] = {"case": " + ".join("x".join(map(str, shape)) for shape in case), **times}
    row |= {"ratio": times["ours gram"] / peer, "best ratio": ours / peer}
    row |= {"of ideal": ideal_ms(case, tflops) / times["ours gram"], "first call s": first_s}
    return row | {"error": max(map(error_against_fp64, stacks))}


def main(arguments: list[str]) -> int:
    """Run, print, write; return the exit status."""
    cuda = torch.cuda.is_available()
    cases = GPU_CASES if cuda else CPU_CASES
    rounds = 7 if "--quick" in arguments or not cuda else 20
    tflops = ceiling_tflops(torch.float16 if cuda else torch.float32)
    rows = [run_case(case, rounds, tflops) for case in cases]
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    single = [row for case, row in zip(cases, rows, strict=True) if len(case) == 1]
    mean = math.exp(sum(math.log(row["ratio"]) for row in single) / len(single))
    print(f"geometric mean of the ratio over {len(single)} shapes: {mean:.3f}; ceiling {tflops:.0f} TFLOP/s")
    dtype = "bfloat16" if cuda else "float32"
    write_result(
        "newton_schulz", rows, unit="milliseconds, median", input_dtype=dtype, geometric_mean=mean, ceiling=tflops
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
