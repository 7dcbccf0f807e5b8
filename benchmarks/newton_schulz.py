"""Newton-Schulz against its peers, interleaved in one process, every result checked against fp64.

    python -m benchmarks.newton_schulz [--quick] [--first-call]

"ours" is prepared (measured choices), "ours static" is not. ``--first-call`` also times a first call in two processes,
with empty compiler caches and with those that the first one left.

On a GPU: torch.optim.Muon's function, gram-newton-schulz (eager and compiled, where it is importable) and ours, on
single matrices, batches, mixed groups of one short side, a whole layer, and one rank's share of two models. On a CPU:
torch.optim.Muon's function, ours, and ours where float32 products may be bfloat16's, as torch's are ("ours, medium",
for ``torch.set_float32_matmul_precision``).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import _muon

import dmuon_runtime as dmuon
from benchmarks.common import interleaved_ms, print_table, write_result
from dmuon_runtime._cpu_precision import iterates_in_bfloat16
from dmuon_runtime._ns_iterations import ns_flops
from dmuon_runtime.matrices import MatrixShape
from dmuon_runtime.partition import WorkItem, assign_owners, owner_cost

__all__ = ["gpu_cases", "main", "share_of_rank"]

Found = TypeVar("Found")
Shape = tuple[int, int, int]
Call = Callable[[Sequence[Tensor]], list[Tensor]]
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
LLAMA_LAYER: tuple[Shape, ...] = ((2, 4096, 4096), (2, 1024, 4096), (2, 14336, 4096), (1, 4096, 14336))
"""q and o, k and v, gate and up, down of one layer of Llama-3-8B."""
QWEN_LAYER: tuple[Shape, ...] = ((2, 2048, 2048), (2, 1024, 2048), (2, 6144, 2048), (1, 2048, 6144))
"""The same of Qwen3-1.7B."""
NUM_RANKS = 8
FIRST_CALL: tuple[Shape, ...] = ((1, 2048, 2048), (1, 2048, 8192))
KELLER_JORDAN = (3.4445, -4.7750, 2.0315)
MEDIUM = "ours, medium"
ROW = "row: "
"""Before a row that a child process prints."""
SLOW_MATRICES = 8
"""torch.optim.Muon loops over matrices: cases with more of them are timed in fewer rounds."""


def share_of_rank(layer: Sequence[Shape], num_layers: int) -> tuple[Shape, ...]:
    """Return what rank 0 of :data:`NUM_RANKS` owns of a model of ``num_layers`` such layers, equal sizes together."""
    matrices = [MatrixShape(1, rows, cols) for count, rows, cols in layer for _ in range(count)] * num_layers
    items = [
        WorkItem(f"{index:04}", owner_cost([matrix], 0, "ns_flops"), str(index // 7), min(matrix.rows, matrix.columns))
        for index, matrix in enumerate(matrices)
    ]
    owners = assign_owners(items, NUM_RANKS)
    mine = Counter((m.rows, m.columns) for m, owner in zip(matrices, owners, strict=True) if owner == 0)
    return tuple((number, *size) for size, number in mine.items())


def gpu_cases() -> dict[str, tuple[Shape, ...]]:
    """Name to stacks."""
    named = {_name(case): case for case in GPU_CASES}
    named["Llama-3-8B layer"] = LLAMA_LAYER
    named["Qwen3-1.7B, 1 of 8 ranks"] = share_of_rank(QWEN_LAYER, 28)
    named["Llama-3-8B, 1 of 8 ranks"] = share_of_rank(LLAMA_LAYER, 32)
    return named


def _name(case: Sequence[Shape]) -> str:
    return " + ".join("x".join(map(str, shape)) for shape in case)


def torch_muon(stacks: Sequence[Tensor]) -> list[Tensor]:
    """The first rival: torch.optim.Muon's own function, one matrix after the other as its step does."""
    return [_muon._zeropower_via_newtonschulz(g, KELLER_JORDAN, 5, 1e-7) for stack in stacks for g in stack]


def gram_newton_schulz(**settings: Any) -> Call | None:
    """The second rival, batched by shape; None where it is not importable."""
    if importlib.util.find_spec("gram_newton_schulz") is None or not torch.cuda.is_available():
        return None
    function = importlib.import_module("gram_newton_schulz").GramNewtonSchulz(**settings)
    return lambda stacks: [function(stack) for stack in stacks]


def contestants(stacks: Sequence[Tensor]) -> dict[str, Call]:
    """Name to a function that orthogonalises all of ``stacks``, each [B, M, N]."""
    found: dict[str, Call] = {"torch": torch_muon}
    eager, compiled = gram_newton_schulz(compile_kwargs=None), gram_newton_schulz()
    if eager and compiled:
        found |= {"gns eager": eager, "gns compiled": compiled}
    ours = {
        "ours": dmuon.NewtonSchulz(),
        "ours static": dmuon.NewtonSchulz(),
        "ours direct": dmuon.NewtonSchulz("direct"),
    }
    if not torch.cuda.is_available():
        ns = dmuon.NewtonSchulz()
        found[MEDIUM] = lambda given: at_medium_precision(lambda: ns.orthogonalize(given, 5))
    choices = ours["ours"].prepare([stack.shape for stack in stacks], stacks[0].dtype, stacks[0].device)
    print(f"chosen: {', '.join(f'{key} {value}' for key, value in choices.entries.items())}", flush=True)
    return found | {name: lambda given, ns=ns: ns.orthogonalize(given, 5) for name, ns in ours.items()}


def at_medium_precision(call: Callable[[], Found]) -> Found:
    """Allow bfloat16 in float32 products during ``call``: what a CPU with such units is fast at."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return call()
    finally:
        torch.set_float32_matmul_precision(before)


def error_against_fp64(g: Tensor, found: Tensor, coefficients: Sequence[Sequence[float]]) -> float:
    """Relative Frobenius error of ``found`` [m, n] against the polynomial of ``g`` in fp64."""
    x, result = g.double(), found.double()
    x = x / x.norm()
    x, result = (x.mT, result.mT) if x.shape[0] > x.shape[1] else (x, result)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return float((result - x).norm() / x.norm())


def worst_error(name: str, call: Call, stacks: Sequence[Tensor]) -> float:
    """Largest error over all matrices of ``stacks`` of what a contestant returns.

    Ours does what was timed. A peer gets stack after stack: its graphs may write over what it returned before.
    """
    coefficients = [KELLER_JORDAN] * 5 if name == "torch" else dmuon.POLAR_EXPRESS_COEFFICIENTS
    worst = 0.0
    for group in [stacks] if name.startswith("ours") else [[stack] for stack in stacks]:
        results = [matrix for part in call(group) for matrix in (part if part.dim() == 3 else part[None])]
        given = [g for stack in group for g in stack]
        errors = [error_against_fp64(g, found, coefficients) for g, found in zip(given, results, strict=True)]
        worst = max(worst, *(math.inf if math.isnan(error) else error for error in errors))
    return worst


def largest_error_allowed(name: str) -> float:
    """What rounding explains: of ours float16 products and bfloat16 output on a GPU, fp32 on a CPU; else bfloat16."""
    if name == MEDIUM or not name.startswith("ours"):
        return 0.05
    return 0.01 if torch.cuda.is_available() else 1e-3


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


def run_case(name: str, case: Sequence[Shape], rounds: int, tflops: float) -> dict[str, Any]:
    """Time one case; return its row."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(sum(map(sum, case)))
    stacks = [torch.randn(shape, device=device, dtype=dtype) for shape in case]
    begin = time.perf_counter()
    calls = contestants(stacks)
    prepare_s = time.perf_counter() - begin
    slow = device == "cuda" and sum(shape[0] for shape in case) > SLOW_MATRICES
    timed = {name: lambda call=call: call(stacks) for name, call in calls.items()}
    times = interleaved_ms(timed, rounds=5 if slow else rounds, warmup=3)
    peer = min(value for name, value in times.items() if not name.startswith("ours"))
    row: dict[str, Any] = {"case": name, **times, "ratio": times["ours"] / peer}
    row |= {"of ideal": ideal_ms(case, tflops) / times["ours"], "prepare s": prepare_s}
    errors = {name: worst_error(name, call, stacks) for name, call in calls.items()}
    row["error"] = max(value for name, value in errors.items() if name.startswith("ours") and name != MEDIUM)
    if MEDIUM in calls:
        row |= {"ratio, medium": times[MEDIUM] / peer, "error, medium": errors[MEDIUM]}
    for rival in ("torch", "gns"):
        row[f"{rival}'s error"] = max((value for name, value in errors.items() if name.startswith(rival)), default=None)
    row["wrong"] = ", ".join(name for name, value in errors.items() if value > largest_error_allowed(name))
    print(f"{name}: ratio {row['ratio']:.3f}", flush=True)
    return row


def first_call_s() -> dict[str, dict[str, float]]:
    """Seconds of a first call in a process with empty compiler caches, and in one that finds them filled."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("QUACK_CACHE_DIR", "TRITON_CACHE_DIR", "DMUON_CACHE_DIR")
        environment = os.environ | {name: f"{folder}/{name.lower()}" for name in names}
        command = [sys.executable, "-m", "benchmarks.newton_schulz", "--child"]
        answers = [
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        ]
    return {name: json.loads(text.splitlines()[-1]) for name, text in zip(("cold", "cached"), answers, strict=True)}


def child() -> int:
    """Print the seconds of a first and of a second, unprepared call."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    stacks = [torch.randn(shape, device=device, dtype=dtype) for shape in FIRST_CALL]
    ns, seconds = dmuon.NewtonSchulz(), []
    for _ in range(2):
        begin = time.perf_counter()
        ns.orthogonalize(stacks, 5)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"first": seconds[0], "second": seconds[1]}))
    return 0


def run_cases(names: Sequence[str], rounds: int, tflops: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Run cases in a child process, and go on in another one where the device faults: rows, and what faulted.

    A fault of one contestant's kernels ends its whole process. The case is then tried once more.
    """
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    left, tries = list(names), Counter[str]()
    while left:
        command = [sys.executable, "-m", "benchmarks.newton_schulz", "--cases", json.dumps([left, rounds, tflops])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(ROW):
                    rows.append(json.loads(line.removeprefix(ROW)))
                    left.remove(rows[-1]["case"])
                else:
                    print(line, end="", flush=True)
        if process.returncode == 0:
            break
        faults.append(f"{left[0]}: a process ended with {process.returncode}")
        print(faults[-1], flush=True)
        tries[left[0]] += 1
        if tries[left[0]] > 1:
            left.pop(0)
    return rows, faults


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean of which the logarithm is the mean of logarithms."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main(arguments: list[str]) -> int:
    """Run, print, write; return the exit status."""
    if "--child" in arguments:
        return child()
    cuda = torch.cuda.is_available()
    cases = gpu_cases() if cuda else {_name(case): case for case in CPU_CASES}
    if "--cases" in arguments:
        names, rounds, tflops = json.loads(arguments[arguments.index("--cases") + 1])
        for name in names:
            print(ROW + json.dumps(run_case(name, cases[name], rounds, tflops)), flush=True)
        return 0
    rounds = 7 if "--quick" in arguments or not cuda else 20
    tflops = ceiling_tflops(torch.float16 if cuda else torch.float32)
    rows, faults = run_cases(list(cases), rounds, tflops)
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    single = [row for row in rows if len(cases[row["case"]]) == 1]
    mean = geometric_mean([row["ratio"] for row in single])
    print(f"geometric mean of the ratio over {len(single)} shapes: {mean:.3f}; ceiling {tflops:.3g} TFLOP/s")
    wrong = [f"{row['case']}: {row['wrong']}" for row in rows if row["wrong"]]
    print("\n".join(["wrong results:", *wrong]) if wrong else "every result agrees with fp64")
    facts: dict[str, Any] = {"input_dtype": "bfloat16" if cuda else "float32", "ceiling": tflops, "faults": faults}
    if not cuda:
        facts["geometric_mean_medium"] = geometric_mean([row["ratio, medium"] for row in single])
        facts["bfloat16_units"] = at_medium_precision(iterates_in_bfloat16)
        print(f"at medium precision: {facts['geometric_mean_medium']:.3f}")
    if "--first-call" in arguments:
        facts["first_call_s"] = first_call_s()
        print("first call, seconds:", facts["first_call_s"])
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")  # without AVX512_CORE_AMX torch has no bfloat16 units to multiply in
    name = "newton_schulz" if cuda or limit is None else f"newton_schulz-{limit.lower()}"
    write_result(name, rows, unit="milliseconds, median", geometric_mean=mean, **facts)
    return 1 if faults or wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
