"""Balance alone: costs onto slots, without names. Pure and deterministic.

Best fit, longest first, under a capacity, with a bisection over the capacity (multifit, Coffman, Garey and Johnson,
1978), then exchanges between the fullest slot and the emptiest ones. A bound that no placement beats says when to stop.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["balance_costs", "even_out", "makespan_bound"]

_MAX_ROUNDS, _MAX_PLACEMENTS = 12, 300_000
"""Bisections, and costs placed in all of them: what keeps 100 000 costs within seconds."""
_MAX_SHARES, _MAX_PARTNERS, _MAX_COMBINATIONS = 256, 16, 1024


def makespan_bound(costs: Sequence[float], num_slots: int) -> float:
    """Return a load that some slot must reach: the mean, the largest cost, and the pigeonhole bounds.

    Among the ``k * num_slots + 1`` largest costs, one slot gets ``k + 1``; at best the smallest of them.
    """
    ordered = sorted(costs, reverse=True)
    if not ordered:
        return 0.0
    bound = max(sum(ordered) / num_slots, ordered[0])
    for end in range(num_slots + 1, len(ordered) + 1, num_slots):
        bound = max(bound, sum(ordered[end - 1 - (end - 1) // num_slots : end]))
    return bound


def balance_costs(costs: Sequence[float], num_slots: int, at_most: float) -> list[int] | None:
    """Return a slot for each cost such that no load reaches ``at_most``, as low as found; None if none was found."""
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    low, high = makespan_bound(costs, num_slots), at_most
    best: list[int] | None = None
    capacity = low
    for _ in range(min(_MAX_ROUNDS, max(1, _MAX_PLACEMENTS // max(1, len(costs))))):
        found = _best_fit(costs, order, num_slots, capacity * (1 + 1e-12))
        if found is None:
            low = capacity
        else:
            slots, reached = found
            if reached >= high:
                break
            best, high = slots, reached
        if high <= low * 1.0005:
            break
        capacity = (low + high) / 2
    return best


def _best_fit(
    costs: Sequence[float], order: Sequence[int], num_slots: int, capacity: float
) -> tuple[list[int], float] | None:
    """Put each cost where it leaves the least room; return the slots and the largest load, or None if it overflows."""
    slots = [0] * len(costs)
    loads: list[float] = [0.0]
    numbers: list[int] = [0]
    num_open = 1
    for index in order:
        cost = costs[index]
        place = bisect_left(loads, capacity - cost)
        if place == len(loads) or loads[place] > capacity - cost:
            place -= 1
        if place < 0:
            if num_open == num_slots:
                return None
            load, number = 0.0, num_open
            num_open += 1
        else:
            load, number = loads.pop(place), numbers.pop(place)
        slots[index] = number
        at = bisect_left(loads, load + cost)
        loads.insert(at, load + cost)
        numbers.insert(at, number)
    return (slots, loads[-1]) if loads[-1] <= capacity else None


def even_out(costs: Sequence[float], slots: Sequence[int], num_slots: int) -> list[int]:
    """Return ``slots`` after the fullest slot has shared anew with the emptiest ones, as long as that lowers it.

    Equal costs are interchangeable, so two slots are shared by how many of each cost the fuller one keeps.
    """
    members: list[list[int]] = [[] for _ in range(num_slots)]
    for index, slot in enumerate(slots):
        members[slot].append(index)
    loads = [sum(costs[index] for index in held) for held in members]
    for _ in range(_MAX_SHARES):
        full = max(range(num_slots), key=loads.__getitem__)
        partners = heapq.nsmallest(_MAX_PARTNERS, range(num_slots), key=lambda slot: (loads[slot], slot))
        best = min(
            ((_share(costs, members[full] + members[other]), other) for other in partners if other != full),
            key=lambda option: (option[0][0], option[1]),
            default=None,
        )
        if best is None or best[0][0] >= loads[full] * (1 - 1e-9):
            break
        (_, kept, given), other = best
        for slot, held in ((full, kept), (other, given)):
            members[slot] = held
            loads[slot] = sum(costs[index] for index in held)
    result = list(slots)
    for slot, held in enumerate(members):
        for index in held:
            result[index] = slot
    return result


def _share(costs: Sequence[float], pool: Sequence[int]) -> tuple[float, list[int], list[int]]:
    """Cut ``pool`` in two as evenly as found; return the larger load and both parts."""
    kinds: dict[float, list[int]] = {}
    for index in pool:
        kinds.setdefault(costs[index], []).append(index)
    names = sorted(kinds, reverse=True)
    if math.prod(len(kinds[kind]) + 1 for kind in names) > _MAX_COMBINATIONS:
        return math.inf, [], []
    total = sum(costs[index] for index in pool)
    choices = itertools.product(*(range(len(kinds[kind]) + 1) for kind in names))

    def larger(counts: tuple[int, ...]) -> float:
        load = sum(count * kind for count, kind in zip(counts, names, strict=True))
        return max(load, total - load)

    counts = min(choices, key=larger)
    kept = [index for count, kind in zip(counts, names, strict=True) for index in kinds[kind][:count]]
    given = [index for count, kind in zip(counts, names, strict=True) for index in kinds[kind][count:]]
    return larger(counts), kept, given
