"""The exporter: the whole catalogue, true sums, and an end to every job's series."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import FORWARD, MATRICES, make_report
from worker.contract.metrics import CATALOGUE
from worker.contract.states import Reason

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(world: World) -> Samples:
    answer = world.client.get("/metrics")
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def with_reports(world: World) -> str:
    job = world.running()
    world.attempt(job).steps(1, 2)
    world.turn()
    return job


def test_every_entry_of_the_catalogue_is_produced_and_nothing_else(world: World) -> None:
    with_reports(world)
    world.client.put("/v1/kernels/quack/breaker", json={"action": "trip", "reason": "x"})
    text = world.client.get("/metrics").text
    names = {m.name for m in CATALOGUE}
    produced = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert produced == {entry.name: entry.kind for entry in CATALOGUE}
    sampled = {name for name, _ in scrape(world)}
    bases = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in sampled} | sampled
    assert names <= bases, f"families without a sample: {names - bases}"
    helps = {line.split()[2]: line.split(" ", 3)[3] for line in text.splitlines() if line.startswith("# HELP")}
    assert helps == {entry.name: entry.help for entry in CATALOGUE}


def test_labels_are_those_of_the_catalogue(world: World) -> None:
    with_reports(world)
    labels = {entry.name: set(entry.labels) for entry in CATALOGUE}
    for name, found in scrape(world):
        base = next(n for n in (name, name.rsplit("_", 1)[0]) if n in labels)
        assert {key for key, _ in found} - {"le"} == labels[base], name


def test_sums(world: World) -> None:
    job = with_reports(world)
    found = scrape(world)
    assert value(found, "dmuon_comm_bytes_total", job=job, route="muon", phase="forward") == 2 * 2 * FORWARD
    assert value(found, "dmuon_comm_planned_bytes_per_step", job=job, route="muon", phase="forward") == 2 * FORWARD
    assert value(found, "dmuon_ns_matrices_total", job=job, kernel="cublas", algorithm="gram") == 2 * MATRICES
    assert value(found, "dmuon_tokens_total", job=job) == 64
    assert value(found, "dmuon_steps_total", job=job) == 2
    assert value(found, "dmuon_update_rms", job=job, route="muon") == pytest.approx(math.sqrt((4 + 8) / 8))
    assert value(found, "dmuon_owner_compute_seconds_total", job=job, rank="1") == pytest.approx(0.04)
    assert value(found, "dmuon_step_duration_seconds_count", job=job) == 2
    assert value(found, "dmuon_step_duration_seconds_bucket", job=job, le="0.025") == 0
    assert value(found, "dmuon_step_duration_seconds_bucket", job=job, le="0.05") == 2
    assert value(found, "dmuon_job_state", job=job, state="RUNNING") == 1
    assert value(found, "dmuon_jobs", state="RUNNING") == 1
    assert value(found, "dmuon_jobs_finished_total", reason="user_error") == 0
    assert value(found, "dmuon_queue_wait_seconds_count") == 1
    states = [v for (n, labels), v in found.items() if n == "dmuon_breaker_state" and ("kernel", "quack") in labels]
    assert sorted(states) == [0, 0, 0, 0, 0, 1]


def test_latency_is_by_template_and_not_by_address(world: World) -> None:
    job = with_reports(world)
    world.client.get(f"/v1/jobs/{job}")
    handlers = {dict(labels)["handler"] for name, labels in scrape(world) if name.startswith("dmuon_http_request")}
    assert "/v1/jobs/{job_id}" in handlers and "/v1/jobs" in handlers
    assert not any(job in handler for handler in handlers)


def test_case_10_series_vanish_after_the_grace_period(world: World) -> None:
    job = with_reports(world)
    world.attempt(job).end(Reason.COMPLETED)
    world.turn()
    world.clock.advance(59)
    assert value(scrape(world), "dmuon_loss", job=job) == 2.0
    world.clock.advance(2)
    found = scrape(world)
    assert not [name for name, labels in found if ("job", job) in labels]
    assert value(found, "dmuon_jobs_finished_total", reason="completed") == 1
    assert value(found, "dmuon_jobs", state="SUCCEEDED") == 1


def test_totals_never_go_down(world: World) -> None:
    job = with_reports(world)
    before = scrape(world)
    world.attempt(job).push(make_report(0, 1), make_report(1, 1))  # late, and of an earlier step
    world.attempt(job).dead = True
    world.turn(2)
    after = scrape(world)
    for (name, labels), old in before.items():
        if name.endswith("_total") and ("job", job) in labels:
            assert after[name, labels] >= old, name


def test_a_loss_that_is_no_number_is_shown(world: World) -> None:
    job = world.running()
    world.attempt(job).push(make_report(0, 1, loss=float("nan")))
    world.turn()
    assert math.isnan(value(scrape(world), "dmuon_loss", job=job))
