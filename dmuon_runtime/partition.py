"""Who owns what: longest-processing-time-first over the true cost of the work. Pure, deterministic, heap based.

Where that stays above the bound that the costs themselves set, costs are balanced without names and the names placed
after. Balance decides. Among slots whose load is within a thousandth of the ideal of the lowest, a slot that does not
yet hold a parameter of the same layer is better, and then one that already has a matrix of the same short side, since
those share one Newton-Schulz batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dmuon_runtime._balance import balance_costs, even_out, makespan_bound
from dmuon_runtime.errors import SettingError
from dmuon_runtime.matrices import MatrixShape

__all__ = [
    "DEFAULT_NS_WORK",
    "CostModel",
    "NsWork",
    "OwnerStrategy",
    "WorkItem",
    "assign_owners",
    "elementwise_cost",
    "ns_flops",
    "owner_cost",
]

OwnerStrategy = Literal["lpt", "round_robin", "rank0"]
CostModel = Literal["ns_flops", "numel"]

FLOPS_PER_BYTE = 184.0
"""Dense half-precision FLOPs in the time of one byte of memory traffic on an H200 (790 TFLOP/s over 4.3 TB/s)."""
ADAMW_BYTES_PER_ELEMENT = 28.0
"""fp32 AdamW reads weight, gradient and two moments, and writes three of them."""
_WINDOW = 8
_TOLERANCE_RATIO = 1e-3
_GOOD_ENOUGH = 1.005
"""Largest load over the bound at which longest-first is left as it is."""


@dataclass(frozen=True)
class WorkItem:
    """One parameter to place: its cost, the layer it is spread within, and its short side (0: no matrix)."""

    name: str
    cost: float
    layer: str
    short_side: int


@dataclass(frozen=True)
class NsWork:
    """How Newton-Schulz iterates, as far as its FLOPs depend on it."""

    steps: int = 5
    num_restarts: int = 1
    """Of the Gram form."""
    algorithm: Literal["gram", "direct"] = "gram"
    """``gram`` takes the direct form where that costs fewer FLOPs; on CUDA both are measured where they are close."""


DEFAULT_NS_WORK = NsWork()
"""What owners are chosen by, and what a job does that says nothing else."""


def ns_flops(matrix: MatrixShape, work: NsWork = DEFAULT_NS_WORK) -> float:
    """Return FLOPs of Newton-Schulz, symmetric products charged half.

    The Gram form takes ``4Tn^3 + 3(mn^2 - n^3)(1 + r)``, the direct one ``T(3mn^2 + n^3)``.
    """
    n, m = sorted((matrix.rows, matrix.columns))
    direct = work.steps * (3.0 * m * n**2 + n**3)
    gram = 4.0 * work.steps * n**3 + 3.0 * (m * n**2 - n**3) * (1 + work.num_restarts)
    return matrix.count * (direct if work.algorithm == "direct" else min(gram, direct))


def elementwise_cost(elements: int) -> float:
    """Return the FLOP equivalent of the memory traffic of one AdamW update of ``elements``."""
    return elements * ADAMW_BYTES_PER_ELEMENT * FLOPS_PER_BYTE


def owner_cost(matrices: Sequence[MatrixShape], elements: int, model: CostModel) -> float:
    """Return the planned cost of a parameter: of its ``matrices`` if it has any, else of its ``elements``.

    Always that of :data:`DEFAULT_NS_WORK`: owners stay, and a plan keeps its hash, when a job's kernels are swapped.
    """
    if model == "numel":
        return float(elements)
    if matrices:
        return sum(ns_flops(matrix) for matrix in matrices)
    return elementwise_cost(elements)


def _check(world_size: int, strategy: str) -> None:
    if strategy not in get_args(OwnerStrategy):
        raise SettingError(f"owner_strategy {strategy!r} is unknown; use one of {', '.join(get_args(OwnerStrategy))}")
    if world_size < 1:
        raise SettingError(f"world size must be at least 1, not {world_size}")


def assign_owners(items: Sequence[WorkItem], world_size: int, strategy: OwnerStrategy = "lpt") -> list[int]:
    """Return the owner rank of each item, in the order of ``items``."""
    _check(world_size, strategy)
    if strategy == "rank0":
        return [0] * len(items)
    if strategy == "round_robin":
        return [index % world_size for index in range(len(items))]
    return _lower(items, world_size, _longest_first(items, world_size))


def _longest_first(items: Sequence[WorkItem], world_size: int) -> list[int]:
    owners = [0] * len(items)
    target = max(sum(item.cost for item in items) / world_size, max((item.cost for item in items), default=0.0))
    tolerance = target * _TOLERANCE_RATIO
    heap = [(0.0, slot) for slot in range(world_size)]
    layers: set[tuple[str, int]] = set()
    sides: set[tuple[int, int]] = set()
    for index in sorted(range(len(items)), key=lambda i: (-items[i].cost, items[i].name)):
        item = items[index]
        candidates = [heapq.heappop(heap)]
        while heap and len(candidates) < _WINDOW and heap[0][0] <= candidates[0][0] + tolerance:
            candidates.append(heapq.heappop(heap))
        chosen = min(
            candidates,
            key=lambda entry: (
                (item.layer, entry[1]) in layers,
                (item.short_side, entry[1]) not in sides,
                entry,
            ),
        )
        for entry in candidates:
            heapq.heappush(heap, (entry[0] + item.cost, entry[1]) if entry is chosen else entry)
        owners[index] = chosen[1]
        layers.add((item.layer, chosen[1]))
        sides.add((item.short_side, chosen[1]))
    return owners


def _lower(items: Sequence[WorkItem], num_slots: int, owners: list[int]) -> list[int]:
    """Return owners with a smaller largest load if one is found that is worth it, else ``owners``."""
    costs = [item.cost for item in items]
    reached = _largest_load(costs, owners, num_slots)
    if reached <= makespan_bound(costs, num_slots) * _GOOD_ENOUGH:
        return owners
    slots = even_out(costs, balance_costs(costs, num_slots, reached) or owners, num_slots)
    if _largest_load(costs, slots, num_slots) > reached * (1 - _TOLERANCE_RATIO):
        return owners
    return _place_names(items, slots)


def _largest_load(costs: Sequence[float], slots: Sequence[int], num_slots: int) -> float:
    loads = [0.0] * num_slots
    for cost, slot in zip(costs, slots, strict=True):
        loads[slot] += cost
    return max(loads)


def _place_names(items: Sequence[WorkItem], slots: Sequence[int]) -> list[int]:
    """Let items of equal cost trade slots, which changes no load, so that a slot gets few of one layer."""
    kinds: dict[float, list[int]] = {}
    for index in sorted(range(len(items)), key=lambda i: items[i].name):
        kinds.setdefault(items[index].cost, []).append(index)
    owners = list(slots)
    layers: set[tuple[str, int]] = set()
    sides: set[tuple[int, int]] = set()
    for cost in sorted(kinds, reverse=True):
        free = sorted(slots[index] for index in kinds[cost])
        for index in kinds[cost]:
            item = items[index]
            window = range(min(_WINDOW, len(free)))
            at = min(
                window,
                key=lambda i: ((item.layer, free[i]) in layers, (item.short_side, free[i]) not in sides, i),
            )
            owners[index] = free.pop(at)
            layers.add((item.layer, owners[index]))
            sides.add((item.short_side, owners[index]))
    return owners
