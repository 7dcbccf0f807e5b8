"""Plans are pure, balanced and complete; routes that make no sense are refused with what mends them."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import dmuon_runtime as dmuon
from dmuon_runtime import errors
from dmuon_runtime.matrices import MatrixShape
from dmuon_runtime.partition import NsWork, WorkItem, assign_owners, ns_flops
from dmuon_runtime.plan import RuntimePlan


class Expert(nn.Module):
    """A 3-D weight, as fused experts have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called."""
        return x


class Zoo(nn.Module):
    """One of everything that strict routing looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)) for _ in range(4)
        )
        self.experts = Expert()
        self.gate = nn.Linear(8, 1, bias=False)
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called."""
        return x


POLICY: dict[str, object] = {
    "overrides": [
        {"name": ["embed", "lm_head"], "set": {"route": "sharded_adamw"}},
        {"name": ["1.weight", "bias", "gate"], "set": {"route": "adamw"}},
        {"name": "experts", "set": {"matrix_view": "experts"}},
        {"name": "nothing", "set": {"route": "adamw"}},
    ]
}


def _trains(name: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _plan(
    world_size: int | tuple[int, int] = 3, policy: dict[str, object] | None = POLICY, **options: object
) -> RuntimePlan:
    with torch.device("meta"):
        model = Zoo()
    return dmuon.plan_params(model, world_size, _trains, param_policy=policy, **options)  # type: ignore[arg-type]


def test_plan_is_pure_and_hashes_everything() -> None:
    assert _plan().hash == _plan().hash == dmuon.plan_params(Zoo(), 3, _trains, param_policy=POLICY).hash
    others = [_plan(4), _plan(reshard_after_forward=False), _plan(process_group_policy="shared")]
    others.append(_plan(owner_strategy="rank0"))
    assert len({plan.hash for plan in [_plan(), *others]}) == 5


def test_plan_is_complete() -> None:
    plan = _plan()
    trained = {name for name, p in Zoo().named_parameters() if p.requires_grad and p.numel()}
    assert {entry.name for entry in plan.parameters} == trained
    assert plan.frozen == ("frozen",)
    assert Counter(i for unit in plan.units for b in unit.buckets for i in b.parameters) == Counter(
        range(len(plan.parameters))
    )
    assert [w for w in plan.warnings if "empty" in w] and [w for w in plan.warnings if "overrides[3] (nothing)" in w]
    assert plan.num_matrices == sum(rank.matrices for rank in plan.ranks) == 8 + 4
    assert sorted(plan.backward_order) == list(range(len(plan.units)))


def test_buckets_do_not_overlap_and_shards_are_equal() -> None:
    for world_size in (1, 2, 3, 7):
        plan = _plan(world_size)
        for bucket in plan.buckets:
            ends = [o + plan.parameters[i].elements for o, i in zip(bucket.offsets, bucket.parameters, strict=True)]
            assert all(end <= begin for end, begin in zip(ends, bucket.offsets[1:], strict=False))
            assert ends[-1] <= bucket.numel
            if bucket.owner is None:
                assert bucket.numel % world_size == 0


def test_traffic_follows_from_buckets() -> None:
    z3, z2, one = _plan(), _plan(reshard_after_forward=False), _plan(1)
    assert one.traffic == {}
    assert {phase for _, phase in z2.traffic} == {"forward", "reduce"}
    assert z3.traffic["muon", "backward"] == z3.traffic["muon", "forward"]
    total = sum(item.payload_bytes for (_, phase), item in z3.traffic.items() if phase == "reduce")
    assert total == sum(bucket.numel * 4 for bucket in z3.buckets)
    assert all(rank.peak_bytes > rank.resident_bytes > 0 for rank in z3.ranks)


def test_a_grid_spreads_owners_over_all_ranks() -> None:
    """Ranks are numbered along the grid; each owner's column alone reduces twice and hears what is published."""
    grid, row = _plan((2, 3)), _plan(6)
    assert grid.mesh_shape == (2, 3) and grid.world_size == 6 and grid.hash != row.hash
    assert [entry.owner for entry in grid.parameters] == [entry.owner for entry in row.parameters]
    assert grid.place(5) == (2, 1)
    for shard_rank in range(3):
        table = grid.rank_traffic[shard_rank]
        assert table == grid.rank_traffic[shard_rank + 3], "ranks of one column are alike"
        published = [b for b in grid.buckets if b.owner is not None and b.owner % 3 == shard_rank]
        assert sum(item.payload_bytes for (_, phase), item in table.items() if phase == "publish") == sum(
            bucket.publish_bytes for bucket in published
        )
        reduced = sum(item.payload_bytes for (_, phase), item in table.items() if phase == "reduce")
        sharded = [bucket for bucket in grid.buckets if bucket.owner is None]
        assert reduced == sum(b.reduce_bytes for b in (*grid.buckets, *published)) + sum(
            bucket.reduce_bytes // 3 for bucket in sharded
        )


def test_resident_bytes_by_mode() -> None:
    """Owners hold masters and state once; replicas add a copy in the column, replicated storage one on every rank."""
    row, grid, everywhere = _plan(4), _plan((2, 2)), _plan(4, storage="replicated", reshard_after_forward=True)
    totals = [sum(rank.resident_bytes for rank in plan.ranks) for plan in (row, grid, everywhere)]
    copies = sum(bucket.publish_bytes for bucket in grid.buckets if bucket.owner is not None)
    assert totals[1] - totals[0] == copies + sum(b.numel * 12 for b in grid.buckets if b.owner is None) * 2 - sum(
        b.numel * 12 for b in row.buckets if b.owner is None
    )
    assert totals[2] - totals[0] == 4 * sum(bucket.gather_bytes for bucket in everywhere.buckets)
    assert not everywhere.reshard_after_forward and {p for _, p in everywhere.traffic} == {"reduce", "publish"}
    half = _plan((2, 2), publish_dtype="bf16")
    assert 2 * sum(b.publish_bytes for b in half.buckets) == sum(b.publish_bytes for b in grid.buckets)


def test_large_plans_stay_fast() -> None:
    """Load and traffic of 4096 ranks are one pass over the buckets, not one for each rank."""
    plan = _plan((16, 256))
    assert len(plan.ranks) == len(plan.rank_traffic) == 4096
    assert sum(rank.matrices for rank in plan.ranks) == plan.num_matrices


def test_guests_are_part_of_the_plan() -> None:
    plan = dmuon.plan_params(Zoo(), 3, lambda name, _: "embed" not in name, param_policy=POLICY)
    assert "embed.weight" in plan.guests and "embed.weight" not in {entry.name for entry in plan.parameters}
    assert plan.hash != _plan().hash


def test_strict_routes_name_all_offenders_and_cures() -> None:
    with pytest.raises(dmuon.RouteRefused) as found:
        _plan(policy=None)
    refused = set(found.value.names)
    assert {"embed.weight", "lm_head.weight", "gate.weight", "experts.weight", "layers.0.1.weight"} <= refused
    assert "layers.0.0.weight" not in refused
    text = str(found.value)
    assert '"name": ["experts.weight"], "set": {"matrix_view": "experts"}' in text
    assert "has a dim of 1" in text and "output head" in text and "fewer than two dims" in text
    permissive = _plan(policy=None, strict_routes=False)
    assert {entry.route for entry in permissive.parameters} == {"muon"}


def test_tied_head_is_refused_as_an_embedding() -> None:
    model = Zoo()
    model.lm_head.weight = model.embed.weight
    policy: dict[str, object] = {
        "overrides": [{"name": ["1.weight", "bias", "gate", "experts"], "set": {"route": "adamw"}}]
    }
    with pytest.raises(dmuon.RouteRefused, match="tied to an output") as found:
        dmuon.plan_params(model, 2, _trains, param_policy=policy)
    assert found.value.names == ("embed.weight",)


def test_split_rows_must_cover_the_rows() -> None:
    policy: dict[str, object] = {
        "overrides": [*POLICY["overrides"], {"name": "layers.0.0.w", "set": {"split_rows": [5, 5]}}]
    }  # type: ignore[misc]
    with pytest.raises(dmuon.RouteRefused, match=r"adds up to 10, but it has 12 rows"):
        _plan(policy=policy)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"world_size": (2, 2), "storage": "replicated"}, dmuon.MeshError),
        ({"world_size": (0, 2)}, dmuon.SettingError),
        ({"publish_dtype": "int8"}, dmuon.SettingError),
        ({"storage": "elsewhere"}, dmuon.SettingError),
        ({"owner_strategy": "best"}, dmuon.SettingError),
        ({"owner_cost_model": "guess"}, dmuon.SettingError),
        ({"process_group_policy": "mine"}, dmuon.SettingError),
        ({"hook_boundary_predicate": lambda module: False}, dmuon.BoundaryError),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        _plan(**options)


def test_casts_at_one_boundary_must_agree() -> None:
    mixed: dict[str, object] = {
        "defaults": {"cast_forward_inputs": True},
        "overrides": [*POLICY["overrides"], {"name": "layers.0.0.weight", "set": {"param_dtype": "bf16"}}],  # type: ignore[misc]
    }
    with pytest.raises(dmuon.DtypeConflict, match=r"layers\.0 casts its inputs"):
        _plan(policy=mixed)


def test_boundary_predicate_takes_the_lowest_ancestor() -> None:
    plan = _plan(hook_boundary_predicate=lambda module: isinstance(module, (nn.Sequential, Zoo)))
    assert [unit.name for unit in plan.units] == ["", "layers.0", "layers.1", "layers.2", "layers.3"]
    assert plan.backward_order == (0, 4, 3, 2, 1), "the enclosing module's backward begins first"


LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


@pytest.mark.parametrize("world_size", [8, 16, 32, 64])
def test_longest_first_balances_a_real_model(world_size: int) -> None:
    """Load of the busiest rank over the mean for 32 layers; with 64 ranks single matrices begin to show."""
    items = [
        WorkItem(f"layers.{i}.{j}", ns_flops(MatrixShape(1, *shape)), f"layers.{i}", min(shape))
        for i in range(32)
        for j, shape in enumerate(LLAMA)
    ]
    owners = assign_owners(items, world_size)
    load = [0.0] * world_size
    for item, owner in zip(items, owners, strict=True):
        load[owner] += item.cost
    assert max(load) * world_size / sum(load) <= (1.01 if world_size <= 32 else 1.05)
    assert owners == assign_owners(items, world_size)
    spread = [len({o for item, o in zip(items, owners, strict=True) if item.layer == f"layers.{i}"}) for i in range(32)]
    assert sum(spread) / 32 >= 4.0


def test_owner_strategies() -> None:
    items = [WorkItem(str(i), float(i + 1), "", 0) for i in range(5)]
    assert assign_owners(items, 2, "rank0") == [0] * 5
    assert assign_owners(items, 2, "round_robin") == [0, 1, 0, 1, 0]
    assert assign_owners([], 3) == []
    with pytest.raises(dmuon.SettingError):
        assign_owners(items, 0)


def test_gram_flops_match_the_direct_form_for_squares() -> None:
    """Five steps with one restart cost 20 n^3 on a square, as the direct form does, and 0.58 of it at 4 to 1."""
    assert ns_flops(MatrixShape(1, 64, 64)) == 20 * 64**3
    direct = 5 * (3 * 4 * 64 * 64**2 + 64**3)
    assert ns_flops(MatrixShape(1, 64, 256)) / direct == pytest.approx(38 / 65)


def test_flops_follow_steps_restarts_and_form() -> None:
    wide = MatrixShape(1, 256, 64)
    assert ns_flops(wide, NsWork(algorithm="direct")) == 5 * (3 * 4 * 64**3 + 64**3)
    assert ns_flops(wide, NsWork(8, 2)) == 4 * 8 * 64**3 + 3 * 3 * 64**3 * 3
    assert ns_flops(wide, NsWork(2, 9)) == ns_flops(wide, NsWork(2, algorithm="direct")), "the form that has fewer"
    plan = dmuon.plan_params(nn.Linear(64, 256, bias=False), 1, lambda *_: True)
    assert plan.ns_flops(NsWork(3, 0)) == ns_flops(wide, NsWork(3, 0)) != plan.ns_flops(NsWork())
    assert plan.ranks[0].cost == plan.ns_flops(NsWork()), "owners are chosen by the default"


@pytest.mark.parametrize("name", list(errors.__all__))
def test_errors_survive_pickling(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("what and cure", ("a", "b"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.names, again.code) == ("what and cure", ("a", "b"), error.code)
    assert isinstance(again, ValueError)


def test_error_codes_differ() -> None:
    codes = [getattr(errors, name).code for name in errors.__all__]
    assert len(set(codes)) == len(codes)


def test_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _plan().world_size = 5  # type: ignore[misc]
