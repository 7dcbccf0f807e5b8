"""Ownership: load of the busiest rank over the mean, beside the public package's figures and what the matrices allow.

    python -m benchmarks.partition [--quick]

No device and no processes: shapes and slots only. The public package's figures (``theirs``) and those of a plain
longest-first (``plain``) were measured by us on the same FLOP model as its own documents use; that model differs in its
constants from ours, so figures near a rounding step compare, and the last digit does not.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import print_table, write_result
from dmuon_runtime._balance import makespan_bound
from dmuon_runtime.matrices import MatrixShape
from dmuon_runtime.partition import WorkItem, assign_owners, ns_flops

__all__ = ["main"]

Shape = tuple[int, int]
SLOTS = (8, 16, 32, 64, 128)
TARGET = 1.05
BUDGET_S = 10.0


def decoder(hidden: int, key_value: int, intermediate: int) -> list[Shape]:
    """Shapes of one gated decoder layer: query, key, value, output, gate, up, down."""
    attention = [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
    return [*attention, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]


def encoder(hidden: int, intermediate: int) -> list[Shape]:
    """Shapes of one plain layer with four square projections."""
    return [(hidden, hidden)] * 4 + [(intermediate, hidden), (hidden, intermediate)]


Stacks = list[tuple[int, list[Shape]]]
MODELS: dict[str, Stacks] = {
    "Qwen2.5-1.5B": [(28, decoder(1536, 256, 8960))],
    "Llama-3.2-3B": [(28, decoder(3072, 1024, 8192))],
    "Qwen2.5-7B": [(28, decoder(3584, 512, 18944))],
    "Llama-3.1-8B": [(32, decoder(4096, 1024, 14336))],
    "WallX-like": [
        (36, decoder(2048, 256, 11008)), (36, decoder(512, 256, 2048)),
        (32, [(3840, 1280), (1280, 1280), (3420, 1280), (3420, 1280), (1280, 3420)]), (1, [(5120, 5120), (2048, 5120)]),
    ],
    "SigLIP-So400m": [(27, encoder(1152, 4304))],
    "GPT-2-small-like": [(12, encoder(768, 3072))],
}  # fmt: skip
PUBLIC: dict[str, dict[int, tuple[float, float]]] = {
    "Qwen2.5-1.5B": {8: (1.06, 1.00), 16: (1.13, 1.01), 32: (1.37, 1.01), 64: (1.17, 1.17), 128: (1.17, 1.17)},
    "Llama-3.2-3B": {8: (1.05, 1.00), 16: (1.08, 1.00), 32: (1.22, 1.05), 64: (1.22, 1.22), 128: (1.43, 1.43)},
    "Qwen2.5-7B": {8: (1.07, 1.00), 16: (1.07, 1.00), 32: (1.26, 1.00), 64: (1.16, 1.16), 128: (1.16, 1.16)},
    "Llama-3.1-8B": {8: (1.03, 1.00), 16: (1.06, 1.00), 32: (1.14, 1.00), 64: (1.07, 1.04), 128: (1.20, 1.14)},
    "WallX-like": {8: (1.20, 1.00), 16: (1.44, 1.00), 32: (1.85, 1.36), 64: (2.73, 2.73), 128: (5.45, 5.45)},
    "SigLIP-So400m": {16: (1.19, 1.05), 32: (1.19, 1.07), 64: (2.37, 1.19), 128: (4.74, 1.28)},
    "GPT-2-small-like": {16: (1.33, 1.02), 32: (2.67, 1.06), 64: (5.33, 1.41), 128: (10.7, 2.51)},
}
"""By slots: the public package's placement and a plain longest-first. Its WallX shapes are near, not the same."""


def items_of(stacks: Stacks) -> list[WorkItem]:
    """Return the matrices of a model as items to place."""
    return [
        WorkItem(f"{stack}.{layer}.{number}", ns_flops(MatrixShape(1, *shape)), f"{stack}.{layer}", min(shape))
        for stack, (num_layers, shapes) in enumerate(stacks)
        for layer in range(num_layers)
        for number, shape in enumerate(shapes)
    ]


def whole_bound(costs: Sequence[float], num_slots: int) -> float:
    """Return the smallest load that whole matrices can make and that is not below :func:`makespan_bound`.

    The largest load is a sum of whole costs, so it is at least the first such sum at or above the bound.
    """
    bound = makespan_bound(costs, num_slots)
    kinds = sorted(set(costs), reverse=True)
    best = sum(costs)
    ranges = [range(min(costs.count(kind), int(2 * bound // kind) + 1) + 1) for kind in kinds[:-1]]
    for counts in itertools.product(*ranges):
        load = sum(count * kind for count, kind in zip(counts, kinds, strict=False))
        missing = max(0, -int((load - bound * (1 - 1e-12)) // kinds[-1])) if load < bound else 0
        if missing <= costs.count(kinds[-1]):
            best = min(best, load + missing * kinds[-1])
    return max(bound, best)


def run_case(model: str, items: Sequence[WorkItem], num_slots: int) -> dict[str, Any]:
    """Place one model; return its row."""
    costs = [item.cost for item in items]
    mean = sum(costs) / num_slots
    begin = time.perf_counter()
    owners = assign_owners(items, num_slots)
    seconds = time.perf_counter() - begin
    loads = [0.0] * num_slots
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    theirs, plain = PUBLIC[model].get(num_slots, (None, None))
    row: dict[str, Any] = {"model": model, "matrices": len(items), "slots": num_slots, "ours": max(loads) / mean}
    row |= {"theirs": theirs, "plain": plain, "largest": max(costs) / mean}
    bound = whole_bound(costs, num_slots) if len(set(costs)) <= 4 else makespan_bound(costs, num_slots)
    return row | {"bound": bound / mean, "idle": loads.count(0.0), "ms": seconds * 1e3}


def large_seconds(num_items: int, num_slots: int) -> float:
    """Seconds to place a made-up model whose costs leave longest-first above its bound, the slow case."""
    draw = random.Random(0)
    kinds = [3.0, 5.0, 8.5, 20.0, 33.0]
    items = [WorkItem(f"l{i // 7}.{i}", draw.choice(kinds), f"l{i // 7}", i % 7) for i in range(num_items)]
    begin = time.perf_counter()
    assign_owners(items, num_slots)
    return time.perf_counter() - begin


def main(arguments: list[str]) -> int:
    """Run, print, write; return 1 when a placement misses the target that its matrices allow, or takes too long."""
    rows = [run_case(model, items_of(stacks), slots) for model, stacks in MODELS.items() for slots in SLOTS]
    print_table(list(rows[0]), [["-" if cell is None else cell for cell in row.values()] for row in rows])
    missed = [row for row in rows if row["ours"] > max(TARGET, row["bound"] * 1.001)]
    for row in missed:
        print(f"missed: {row['model']} on {row['slots']} slots: {row['ours']:.3f}, possible {row['bound']:.3f}")
    size = (10_000, 1_024) if "--quick" in arguments else (100_000, 16_384)
    seconds = large_seconds(*size)
    print(f"{size[0]} parameters on {size[1]} slots: {seconds:.2f} s")
    write_result("partition", rows, unit="largest load over mean load", large={"size": size, "seconds": seconds})
    return int(bool(missed) or seconds > BUDGET_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
