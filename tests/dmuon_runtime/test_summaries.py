"""The two summaries: plain JSON with a schema that stays, and a table to read. One rank, no communication."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dmuon_runtime as dmuon
from dmuon_runtime.chips import H200
from dmuon_runtime.cost_model import StepWork
from tests.multiproc.models import POLICY, make

GROUP_KEYS = {
    "group_index", "num_parameters", "owned_param_count", "num_elements", "use_muon", "route", "group_name",
    "semantic_group_name", "lr", "weight_decay",
}  # fmt: skip
SCHEMA = {
    "groups": {
        "available", "num_groups", "dedicated_param_count", "owned_dedicated_param_count", "groups", "parameters",
        "parameters_truncated", "route_param_counts", "routes", "guests", "frozen", "warnings",
    },
    "parameter": {
        "name", "param_name", "aliases", "route", "rule", "planned_route", "uses_sharded_adamw",
        "matched_policy_overrides", "owner_rank", "is_owner", "group_index", "group_name", "lr", "weight_decay",
        "update_scale", "shape", "numel", "unit", "matrix_view", "split_rows", "param_dtype", "grad_dtype",
        "output_dtype", "master_dtype", "optim_dtype", "cast_forward_inputs",
    },
    "plan": {
        "available", "hash", "world_size", "mesh_shape", "storage", "unit_count", "units", "units_truncated",
        "traffic", "totals", "ranks",
        "planned_cost", "predicted_imbalance", "predicted", "warnings",
    },
    "unit": {"unit_index", "name", "num_parameters", "cast_inputs_to", "output_dtype", "buckets"},
    "bucket": {
        "bucket_index", "route", "owner_rank", "num_parameters", "parameters", "numel", "param_dtype", "grad_dtype",
        "gather_bytes", "reduce_bytes", "publish_bytes",
    },
    "totals": {
        "forward_bytes", "backward_bytes", "reduce_bytes", "publish_bytes", "max_owner_bucket_bytes",
        "same_payload_all_reduce_bytes",
    },
    "rank": {"rank", "cost", "matrices", "resident_bytes", "peak_bytes"},
}  # fmt: skip
"""Others read these: a key may be added, none may go or change its meaning."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.DeviceMesh]:
    """A world of one."""
    store = Path(tmp_path_factory.mktemp("store")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.DeviceMesh("cpu", torch.arange(1))
    dist.destroy_process_group()


@pytest.fixture
def trained(mesh: dist.DeviceMesh) -> tuple[torch.nn.Module, dmuon.Muon]:
    model = make(tied="embed_first", dtype=torch.float32)
    model.layers[0].norm.requires_grad_(False)
    policy: dict[str, object] = {"overrides": POLICY["overrides"]}
    dmuon.dedicate_params(model, mesh, lambda name, p: p.requires_grad, param_policy=policy)
    optimizer = dmuon.Muon(model, lr=torch.tensor(0.02))  # type: ignore[arg-type]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    return model, optimizer


def test_parameter_summary(trained: tuple[torch.nn.Module, dmuon.Muon]) -> None:
    model, optimizer = trained
    summary = dmuon.summarize_param_groups(model, optimizer)
    found = json.loads(json.dumps(summary))
    assert found == dict(summary), "nothing that JSON changes"
    assert set(found) == SCHEMA["groups"]
    assert all(set(row) == SCHEMA["parameter"] for row in found["parameters"])
    assert all(set(group) >= GROUP_KEYS for group in found["groups"])
    assert found["num_groups"] == len(found["groups"]) == 3
    rows = {row["name"]: row for row in found["parameters"]}
    assert found["dedicated_param_count"] == found["owned_dedicated_param_count"] == len(rows)
    assert rows["embed.weight"]["aliases"] == ["lm_head.weight"]
    up = rows["layers.1.up.weight"]
    assert (up["lr"], up["route"], up["rule"]) == (pytest.approx(0.01), "muon", "defaults")
    assert up["update_scale"] == pytest.approx(0.2 * 20**0.5) and rows["norm.bias"]["update_scale"] is None
    assert sum(share["element_ratio"] for share in found["routes"].values()) == pytest.approx(1.0)
    assert found["routes"]["muon"]["elements"] == 3 * 2 * 12 * 20
    assert found["frozen"] == ["layers.0.norm.weight", "layers.0.norm.bias"]
    short = dmuon.summarize_param_groups(model, optimizer, max_rows=2)
    assert len(short["parameters"]) == 2 and short["parameters_truncated"] is True  # type: ignore[arg-type]
    assert short["routes"] == summary["routes"] and f"{len(rows) - 2} more" in str(short)
    text = str(summary)
    assert text.splitlines()[0] == f"{len(rows)} parameters: sharded_adamw 1, adamw 12, muon 6"
    assert all(name in text for name in rows)


def test_plan_summary(trained: tuple[torch.nn.Module, dmuon.Muon]) -> None:
    model, _ = trained
    summary = dmuon.summarize_comm_plan(model)
    found = json.loads(json.dumps(summary))
    assert found == dict(summary)
    assert set(found) == SCHEMA["plan"] and set(found["totals"]) == SCHEMA["totals"]
    assert all(set(unit) == SCHEMA["unit"] for unit in found["units"])
    assert all(set(bucket) == SCHEMA["bucket"] for unit in found["units"] for bucket in unit["buckets"])
    assert all(set(rank) == SCHEMA["rank"] for rank in found["ranks"])
    names = [name for unit in found["units"] for bucket in unit["buckets"] for name in bucket["parameters"]]
    assert len(names) == len(set(names)) == len(dmuon.get_plan(model).parameters)
    assert found["totals"]["same_payload_all_reduce_bytes"] == sum(
        b.reduce_bytes for b in dmuon.get_plan(model).buckets
    )
    assert found["hash"][:12] in str(summary) and "<root>" in str(summary)
    assert found["predicted"] is None, "no chip was named"
    predicted = dmuon.summarize_comm_plan(model, chip=H200, work=StepWork(tokens=64))["predicted"]
    assert json.loads(json.dumps(predicted))["chip"] == "nvidia-h200"
    short = dmuon.summarize_comm_plan(model, max_units=1)
    assert len(short["units"]) == 1 and short["units_truncated"] and short["totals"] == summary["totals"]  # type: ignore[arg-type]


def test_little_on_the_muon_route_is_a_warning(mesh: dist.DeviceMesh) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(400, 4))
    policy: dict[str, object] = {"overrides": [{"name": ["bias", "1.weight"], "set": {"route": "adamw"}}]}
    dmuon.dedicate_params(model, mesh, lambda name, p: True, param_policy=policy)
    summary = dmuon.summarize_param_groups(model, dmuon.Muon(model))
    assert "only 1.0% of all elements are on the muon route" in str(summary)


def test_what_the_plan_warns_of_is_logged(mesh: dist.DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """A token that matches nothing is most often a mistake in writing, and must not stay in the plan alone."""
    policy = {"defaults": {"route": "muon"}, "overrides": [{"name": ["nrom"], "set": {"route": "adamw"}}]}
    dmuon.dedicate_params(torch.nn.Linear(4, 4, bias=False), mesh, lambda name, p: True, param_policy=policy)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "overrides[0] (nrom) matches no managed parameter" in record.getMessage()
