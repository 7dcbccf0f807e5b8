"""The example, whole: it learns, does what the plan says, and every query of the dashboards sees it."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from dashboards.boards import BOARDS
from dashboards.rules import ALERTS, RECORDINGS
from orchestrator import resources as r
from orchestrator.cli.own_service import OwnService
from orchestrator.cli.report import collect_report, render_report
from tests.e2e.jobs import EXAMPLE, wait_for, wait_until_ended
from tests.e2e.panels import Look, complaints, look_at_panels
from tests.e2e.prometheus import LATER, NEEDS_GPU, running_prometheus

pytestmark = [pytest.mark.service, pytest.mark.timeout(400)]


@dataclass(frozen=True, slots=True)
class Run:
    """What was seen of one run of the example."""

    job: r.JobResource
    routes: r.RoutesResource
    losses: list[float | None]
    queried: dict[str, list[dict[str, Any]]]
    """Series by query of a panel, recording or operand of an alert, asked in the middle of the run."""
    groups: list[dict[str, Any]]
    """Rule groups as Prometheus evaluated them."""
    look: Look
    """All panels at that moment."""
    exposition: str
    report: r.JobResource | str


def _ask_every_query(prometheus: Any, job_id: str) -> dict[str, list[dict[str, Any]]]:
    asked = {rule.record: rule.record for rule in RECORDINGS if rule.filled_by is None}
    for board in BOARDS:
        for panel in board.panels:
            if panel.filled_by is None:
                asked |= {f"{board.uid} / {panel.title} / {query.expr}": query.expr for query in panel.queries}
    for alert in ALERTS:  # one that fires would be the surprise: here its operands must be there to look at
        asked |= {f"{alert.name} / {name}": name for name in re.findall(r"[\w:]*dmuon_[\w:]+", alert.expr)}
    asked = {where: expr for where, expr in asked.items() if expr not in (*LATER, *NEEDS_GPU)}
    return {
        where: prometheus.query(expr.replace("$__rate_interval", "30s").replace("$job", job_id))
        for where, expr in asked.items()
    }


@pytest.fixture(scope="module")
def run(service: OwnService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    with running_prometheus(service, folder) as prometheus, service.client() as client:
        job = client.submit(EXAMPLE.read_text())
        wait_for(client, job.id, lambda seen: seen.progress.step >= 30, timeout_s=200)
        begin = time.monotonic()
        while len(prometheus.query(f'dmuon_steps_total{{job="{job.id}"}}[30s]')) == 0 or time.monotonic() - begin < 16:
            time.sleep(1)
        assert [target["health"] for target in prometheus.targets()] == ["up"], prometheus.targets()
        look = look_at_panels(prometheus, client, job.id, time.time())
        queried, groups = _ask_every_query(prometheus, job.id), prometheus.rules()
        ended = wait_until_ended(client, job.id, timeout_s=300)
        exposition = httpx.get(f"{service.url}/metrics", trust_env=False).text
        points = []
        after = 0
        while page := client.metrics(job.id, after=after).points:
            points += page
            after = page[-1].step
        look.points.extend(points)
        yield Run(
            ended, client.routes(job.id), [p.loss for p in points], queried, groups, look, exposition,
            str(render_report(collect_report(client, job.id))),
        )  # fmt: skip


def test_it_succeeds_and_learns(run: Run) -> None:
    assert (run.job.state, run.job.reason) == ("SUCCEEDED", "completed"), run.job.message
    assert len(run.losses) == run.job.progress.steps == run.job.progress.step
    first, last = run.losses[0], run.losses[-10:]
    assert first is not None and 5.3 < first < 5.7, "bytes at random cost ln 256 = 5.55 nats"
    assert all(loss is not None for loss in last)
    assert sum(loss for loss in last if loss is not None) / len(last) < 2.5


def test_every_route_moved_exactly_the_planned_bytes(run: Run) -> None:
    assert {route.route for route in run.routes.routes} == {"muon", "adamw", "sharded_adamw"}
    for route in run.routes.routes:
        assert route.payload_bytes == sum(part.planned_bytes or 0 for part in route.comm) > 0
        assert 0 <= route.exposed_seconds <= route.comm_seconds
        assert route.overlap_ratio is not None and 0 <= route.overlap_ratio <= 1


def test_communication_time_is_no_more_than_there_was(run: Run) -> None:
    """Each of two ranks has two lanes that are busy with one collective at a time."""
    total = sum(route.comm_seconds for route in run.routes.routes)
    wall = exported(run, "dmuon_step_duration_seconds_sum")
    assert 0 < total <= 2 * 2 * wall * 1.05


def exported(run: Run, name: str) -> float:
    """The value of a series of the job that has no other label."""
    for line in run.exposition.splitlines():
        if line.startswith(f'{name}{{job="{run.job.id}"}}'):
            return float(line.split()[-1])
    raise AssertionError(f"{name} was not exported")


def test_every_matrix_went_through_newton_schulz(run: Run) -> None:
    assert run.routes.planned_ns_matrices == run.routes.ns_matrices > 0
    verification = run.routes.verification
    assert verification is not None and verification.status == "True", verification
    assert sum(entry.launches for entry in run.routes.ns) > 0
    assert {entry.kernel for entry in run.routes.ns} == {"cublas"}


def test_every_query_of_every_panel_returned_data(run: Run) -> None:
    empty = [name for name, series in run.queried.items() if not series]
    assert not empty, f"panels that stay empty: {empty}"
    broken = {
        name: series
        for name, series in run.queried.items()
        if not any(entry["value"][1] not in ("NaN", "+Inf", "-Inf") for entry in series)
    }
    assert not broken, f"panels that show no number: {broken}"


def test_every_panel_shows_what_the_run_fixes(run: Run) -> None:
    """Each of them is named in :mod:`tests.e2e.panels` with the bounds of each of its series."""
    found = complaints(run.look)
    assert not found, "\n".join(found)


def test_rules_are_evaluated_and_a_healthy_job_raises_no_alert(run: Run) -> None:
    rules = [rule for group in run.groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {r.record for r in RECORDINGS} | {a.name for a in ALERTS}
    assert not [rule for rule in rules if rule["health"] != "ok"]
    firing = [alert["labels"]["alertname"] for rule in rules for alert in rule.get("alerts", [])]
    assert not firing, firing


def test_exposition_is_clean(run: Run) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", "check", "metrics"], input=run.exposition, capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if not _takes_ns_for_nanoseconds(line)]
    assert not complaints and not done.stdout, done.stdout + done.stderr


def _takes_ns_for_nanoseconds(complaint: str) -> bool:
    """promtool reads the ``ns`` of Newton-Schulz as a unit."""
    return complaint.startswith("dmuon_ns_") and complaint.endswith("should not contain abbreviated units")
