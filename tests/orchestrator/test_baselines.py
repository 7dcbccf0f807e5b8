"""A job with a baseline: what nothing measures is absent everywhere, and no route is claimed to be verified."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from orchestrator import resources as r
from orchestrator.cli.report import Report, render_plan, render_report
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import make_baseline_report
from tests.orchestrator.test_exporter import scrape
from worker.contract.states import Reason


@pytest.fixture
def job(world: World) -> str:
    job_id = world.running(optimizer={"kind": "muon"})
    attempt = world.attempt(job_id)
    attempt.push(*(make_baseline_report(rank, step) for step in (1, 2) for rank in (0, 1)))
    attempt.end(Reason.COMPLETED, "all steps done")
    world.turn(2)
    return job_id


def shown(*parts: Any) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(*parts)
    return console.export_text()


def test_nothing_is_claimed(world: World, job: str) -> None:
    document: Any = world.job(job)
    assert document["state"] == "SUCCEEDED"
    assert "RoutesVerified" not in {condition["type"] for condition in document["conditions"]}
    routes = world.client.get(f"/v1/jobs/{job}/routes").json()
    assert routes["optimizer"] == "muon" and routes["verification"] is None
    assert routes["ranks"] == [] == routes["ns"] and routes["planned_ns_matrices"] is None
    assert all(route["payload_bytes"] is route["comm_seconds"] is None for route in routes["routes"])


def test_series_that_apply_and_no_others(world: World, job: str) -> None:
    names = {name for name, labels in scrape(world) if ("job", job) in labels}
    assert {
        "dmuon_loss",
        "dmuon_gradient_norm",
        "dmuon_tokens_total",
        "dmuon_update_rms",
        "dmuon_learning_rate",
    } <= names
    assert "dmuon_step_duration_seconds_bucket" in names and "dmuon_parameters" in names
    absent = ("dmuon_comm_", "dmuon_ns_", "dmuon_owner_", "dmuon_kernel_epoch")
    assert not [name for name in names if name.startswith(absent)]


def test_the_tables(world: World, job: str) -> None:
    routes = r.RoutesResource.model_validate(world.client.get(f"/v1/jobs/{job}/routes").json())
    resource = r.JobResource.model_validate(world.job(job))
    text = shown(render_report(Report(job=resource, first_loss=5.0, last_loss=2.0, routes=routes)))
    assert "SUCCEEDED" in text and "optimizer muon: a baseline" in text and "verified" in text.splitlines()[-1]
    assert "Ownership" not in text and "Newton-Schulz" not in text and "planned" in text
    assert resource.plan is not None
    plan = shown(render_plan(resource.plan, [("muon", 1, 16)], []))
    assert "2 workers" in plan and "imbalance" not in plan and "Traffic" not in plan
