"""Laws of ownership: pure, deterministic, balanced as far as whole matrices allow, spread where that costs nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.partition import MODELS, SLOTS, TARGET, items_of, whole_bound
from dmuon_runtime._balance import balance_costs, even_out, makespan_bound
from dmuon_runtime.partition import WorkItem, assign_owners


def _loads(items: list[WorkItem], owners: list[int], num_slots: int) -> list[float]:
    loads = [0.0] * num_slots
    for item, owner in zip(items, owners, strict=True):
        loads[owner] += item.cost
    return loads


def _random_items(draw: random.Random, num_items: int) -> list[WorkItem]:
    kinds = [draw.uniform(1, 30) for _ in range(draw.randint(1, 6))]
    return [WorkItem(f"l{i // 5}.{i}", draw.choice(kinds), f"l{i // 5}", i % 3) for i in range(num_items)]


@pytest.mark.parametrize("model", list(MODELS))
def test_real_models_reach_the_target_or_what_their_matrices_allow(model: str) -> None:
    items = items_of(MODELS[model])
    costs = [item.cost for item in items]
    for num_slots in SLOTS:
        loads = _loads(items, assign_owners(items, num_slots), num_slots)
        imbalance = max(loads) * num_slots / sum(loads)
        exact = len(set(costs)) <= 4
        bound = (whole_bound if exact else makespan_bound)(costs, num_slots) * num_slots / sum(loads)
        assert imbalance <= max(TARGET, bound * 1.001), f"{num_slots} slots: {imbalance:.3f}, possible {bound:.3f}"


@pytest.mark.parametrize("seed", range(30))
def test_every_placement_is_complete_and_within_the_known_bounds(seed: int) -> None:
    """Longest-first is within 4/3 - 1/(3m) of the best (Graham, 1969), and refining it never makes it worse."""
    draw = random.Random(seed)
    num_slots = draw.randint(1, 20)
    items = _random_items(draw, draw.randint(0, 90))
    owners = assign_owners(items, num_slots)
    assert len(owners) == len(items) and all(0 <= owner < num_slots for owner in owners)
    costs = [item.cost for item in items]
    bound = makespan_bound(costs, num_slots)
    largest = max(_loads(items, owners, num_slots))
    assert bound * (1 - 1e-12) <= largest <= sum(costs) / num_slots * 1.002 + max(costs, default=0.0)
    evened = even_out(costs, owners, num_slots)
    assert len(evened) == len(owners)
    assert max(_loads(items, evened, num_slots)) <= largest * (1 + 1e-12)


def test_the_same_on_every_rank_whatever_the_order() -> None:
    """Every rank plans alone: equal items give equal owners, by name and not by place, and nothing is changed."""
    draw = random.Random(7)
    items = [WorkItem(f"{i:03}", draw.choice((3.0, 5.0, 8.0)), f"l{i // 5}", i % 3) for i in range(80)]
    before = list(items)
    owners = {item.name: owner for item, owner in zip(items, assign_owners(items, 7), strict=True)}
    assert items == before
    for _ in range(3):
        shuffled = draw.sample(items, len(items))
        again = {item.name: owner for item, owner in zip(shuffled, assign_owners(shuffled, 7), strict=True)}
        assert again == owners
    assert owners == {item.name: owner for item, owner in zip(items, assign_owners(items, 7), strict=True)}


def test_a_layer_is_spread_where_balance_does_not_care() -> None:
    items = [WorkItem(f"layers.{i}.{j}", 1.0, f"layers.{i}", 8) for i in range(8) for j in range(4)]
    owners = assign_owners(items, 4)
    assert Counter(owners) == dict.fromkeys(range(4), 8)
    for layer in range(8):
        assert len(set(owners[4 * layer : 4 * layer + 4])) == 4, "its gather comes from four owners at once"


def test_equal_short_sides_meet_where_balance_does_not_care() -> None:
    """Four sizes of equal cost on four slots, no layer: each slot ends up with one size, so one batch."""
    items = [WorkItem(f"{i}.{side}", 1.0, f"{i}.{side}", side) for i in range(4) for side in (8, 16, 32, 64)]
    owners = assign_owners(items, 4)
    sides = [{item.short_side for item, owner in zip(items, owners, strict=True) if owner == slot} for slot in range(4)]
    assert Counter(owners) == dict.fromkeys(range(4), 4)
    assert sorted(len(found) for found in sides) == [1, 1, 1, 1]


def test_preferences_never_cost_balance() -> None:
    """The same costs with and without layers and sides: the largest load is the same within a thousandth."""
    for model in ("Llama-3.1-8B", "SigLIP-So400m"):
        items = items_of(MODELS[model])
        plain = [WorkItem(item.name, item.cost, item.name, 0) for item in items]
        for num_slots in SLOTS:
            with_preferences = max(_loads(items, assign_owners(items, num_slots), num_slots))
            without = max(_loads(plain, assign_owners(plain, num_slots), num_slots))
            assert with_preferences <= without * 1.005


def test_bounds_hold_on_what_can_be_counted() -> None:
    assert makespan_bound([], 3) == 0.0
    assert makespan_bound([5.0, 1.0], 2) == 5.0
    assert makespan_bound([2.0] * 4, 3) == 4.0, "four equal costs on three slots: one slot has two"
    assert whole_bound([2.0, 2.0, 2.0, 1.0, 1.0], 3) == pytest.approx(3.0)
    assert balance_costs([3.0, 3.0, 2.0, 2.0, 2.0], 2, 100.0) in ([0, 0, 1, 1, 1], [1, 1, 0, 0, 0])
    assert balance_costs([1.0, 1.0], 2, 1.0) is None, "nothing below the bound exists"
    assert even_out([4.0, 3.0, 3.0, 2.0], [0, 0, 1, 1], 2) in ([0, 1, 1, 0], [1, 0, 0, 1])
