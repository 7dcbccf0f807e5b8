"""The exporter: the whole catalogue, true sums, and an end to every job's series."""

from __future__ import annotations

import math

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.api.app import create_app
from orchestrator.exporter import ProcessFigures, registry_of
from orchestrator.launcher_api import Resources
from orchestrator.store.attempts import append_batch, attempt_by_id, last_attempt, new_attempt
from orchestrator.store.jobs import find_job
from orchestrator.timings import Histogram
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import FORWARD, MATRICES, FakeAttempt, make_report
from worker.contract.gpus import GpuLook
from worker.contract.messages import Entry, PollBatch
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
    job = world.running(checkpoint={"every_steps": 2})
    world.attempt(job).steps(1, 2)
    world.attempt(job).milestone("checkpoint_saved")
    world.turn()
    return job


def test_every_entry_of_the_catalogue_is_produced_and_nothing_else(world: World) -> None:
    world.launcher.looks = (GpuLook(node="10.0.0.5", gpus=(0,)),)
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
    for name, at in (("dmuon_comm_seconds_total", 2 * 0.04), ("dmuon_comm_exposed_seconds_total", 2 * 0.01)):
        assert value(found, name, job=job, route="muon", phase="forward") == pytest.approx(at)
    assert value(found, "dmuon_comm_exposed_seconds_total", job=job, route="muon", phase="reduce") == 0
    assert [value(found, "dmuon_owner_planned_cost", job=job, rank=rank) for rank in "01"] == [1, 2]
    assert value(found, "dmuon_ns_launches_total", job=job, kernel="cublas", algorithm="gram") == 10 * 2 * MATRICES


def test_each_rank_has_its_own_figures_and_the_worst_is_shown(world: World) -> None:
    job = world.running()
    odd = {"kernel_epoch": 3, "ns_orthogonality_error": 0.7, "fallback_calls": 5, "memory_bytes": 7}
    world.attempt(job).push(
        make_report(0, 2, skipped=1).model_copy(update={"fallback_calls": 1}),
        make_report(1, 2, skipped=1).model_copy(update=odd),
    )
    world.turn()
    found = scrape(world)
    assert [value(found, "dmuon_kernel_epoch", job=job, rank=rank) for rank in "01"] == [0, 3]
    assert [value(found, "dmuon_worker_memory_bytes", job=job, rank=rank) for rank in "01"] == [1 << 20, 7]
    assert value(found, "dmuon_ns_orthogonality_error", job=job) == 0.7, "rank 0 says 0.1"
    assert value(found, "dmuon_ns_fallback_calls_total", job=job) == 1 + 5
    assert value(found, "dmuon_ns_compared_launches_total", job=job, kernel="blocked") == 20 + 20
    assert value(found, "dmuon_skipped_steps_total", job=job) == 1, "of the job, not of each rank"


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


def test_totals_continue_over_a_restart_of_the_control_plane_and_of_the_workers(world: World) -> None:
    job = with_reports(world)
    before = scrape(world)
    again = create_app(world.settings, world.launcher, world.planner, world.clock, reconcile=False)
    with TestClient(again) as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
        after = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    totals = {key: old for key, old in before.items() if key[0].endswith("_total")}
    assert totals and {key: after[key] for key in totals} == totals, "all of it comes from the store"
    second = new_attempt_row(world, job)
    world.launcher.attempts[job, 2] = FakeAttempt(world.attempt(job).start)
    with world.database.write() as session:
        batch = PollBatch(entries=(Entry(seq=1, body=make_report(0, 1)),), dropped=0, alive_ranks=1, ended=False)
        append_batch(session, find_job(session, job), attempt_by_id(session, second), batch)
    found = scrape(world)
    assert value(found, "dmuon_steps_total", job=job) == 2 + 1, "steps of both attempts"
    assert value(found, "dmuon_restarts_total", reason="worker_lost") == 1
    assert all(found[key] >= old for key, old in totals.items())


def new_attempt_row(world: World, job: str) -> int:
    """A second attempt, the first having lost a worker; return its id."""
    with world.database.write() as session:
        row = find_job(session, job)
        first = last_attempt(session, job)
        assert first is not None
        first.ended_at, first.end_reason = 1.0, Reason.WORKER_LOST
        return new_attempt(session, row, now=2.0, epoch=0).id


def test_a_job_over_its_budget_of_series_keeps_whole_families(world: World) -> None:
    with_reports(world)
    full = scrape(world)
    exported = next(v for (n, _), v in full.items() if n == "dmuon_metrics_series")
    per_rank = {n for n, labels in full if "rank" in dict(labels)}
    registry = registry_of(
        world.database,
        world.clock,
        grace_s=60.0,
        series_budget=int(exported) - 1,
        figures=ProcessFigures(http_seconds=Histogram(), pass_seconds=Histogram()),
    )
    tight = [s for f in registry.collect() for s in f.samples if "job" in s.labels]
    names = {s.name for s in tight}
    (gone,) = {n for n, labels in full if "job" in dict(labels)} - names
    assert gone in per_rank, "what grows with the ranks goes first"
    assert not [s for s in tight if s.name == gone], "half a family would give a wrong maximum"
    figures = {s.name: s.value for s in tight if s.name.startswith("dmuon_metrics_series")}
    assert figures["dmuon_metrics_series"] + figures["dmuon_metrics_series_dropped"] == exported
    assert figures["dmuon_metrics_series"] == len(tight) < exported, "all that has the job's label is counted"
    assert exported == sum("job" in dict(labels) for _, labels in full)
    assert figures["dmuon_metrics_series_dropped"] == 2


def test_what_the_cluster_has_and_when_nobody_can_say(world: World) -> None:
    world.launcher.free = Resources(cpus=1)
    world.turn()
    found = scrape(world)
    assert value(found, "dmuon_cluster_resources", resource="cpus", amount="total") == 4
    assert value(found, "dmuon_cluster_resources", resource="cpus", amount="free") == 1
    world.launcher.unreachable = True
    world.clock.advance(11)
    world.turn()
    assert not [name for name, _ in scrape(world) if name == "dmuon_cluster_resources"], "absent, not zero"


def test_conditions_are_series_and_turn_false_with_what_ran(world: World) -> None:
    job = with_reports(world)
    assert value(scrape(world), "dmuon_job_condition", job=job, type="RoutesVerified", status="True") == 1
    world.attempt(job).push(make_report(0, 3, matrices=8), make_report(1, 3))
    world.turn()
    found = scrape(world)
    assert value(found, "dmuon_job_condition", job=job, type="RoutesVerified", status="False") == 1
    assert value(found, "dmuon_job_condition", job=job, type="RoutesVerified", status="True") == 0
