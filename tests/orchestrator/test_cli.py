"""The commands: exit codes, what they print, and the closing table."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchestrator.cli import _console, app
from orchestrator.cli.follow import follow
from orchestrator.cli.report import collect_report, render_report
from orchestrator.client import Client
from orchestrator.errors import FollowTimeout
from orchestrator.store.jobs import find_job
from orchestrator.store.transitions import add_event
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import make_report, make_spec
from worker.contract.states import Reason

runner = CliRunner()


class Bridge(httpx.BaseTransport):
    """Hands requests of the client to the application in this process."""

    def __init__(self, world: World) -> None:
        self._world = world

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        found = self._world.client.request(request.method, path, content=request.read(), headers=headers)
        return httpx.Response(found.status_code, headers=dict(found.headers), content=found.content)


@pytest.fixture
def client(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    token = world.settings.token_file.read_text().strip()
    monkeypatch.setenv("DMUON_STATE_DIR", str(world.settings.state_dir))
    monkeypatch.setattr(_console, "Client", lambda url, token: Client(url, token, transport=Bridge(world)))
    with Client("http://service", token, transport=Bridge(world)) as found:
        yield found


def write_spec(tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "spec.json"
    path.write_text(make_spec(**changes).model_dump_json())
    return str(path)


def run(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, list(words))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_life_in_commands(world: World, client: Client, tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    assert "predicted" not in run("plan", spec)
    predicted = run("plan", spec, "--chip", "nvidia-h200")
    assert "predicted on nvidia-h200: a step of 110.0 ms, +10.0% of 100.0 ms" in predicted and "node_hop_s" in predicted
    plan = json.loads(run("plan", spec, "--json"))
    job = json.loads(run("submit", spec, "--expected-plan-hash", plan["plan_hash"], "--json"))["id"]
    world.turn()
    assert "STARTING" in run("get", job)
    assert job in run("list", "--state", "STARTING")
    assert "submitted" in run("events", job)
    assert "forced_open" in run("trip", "quack", "--reason", "slow")
    assert json.loads(run("reset", "quack", "--reason", "ok", "--json"))["state"] == "closed"
    assert "universal" not in run("kernels") and "cublas" in run("kernels")
    assert "STOPPING" in run("cancel", job)
    world.attempt(job).end(Reason.CANCELLED)
    world.turn()
    assert json.loads(run("get", job, "--json"))["state"] == "CANCELLED"
    run("get", job, "--follow", code=1)


def printed(*words: str, code: int = 0) -> Any:
    """Return the one JSON document that a command prints."""
    result = runner.invoke(app, [*words, "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def test_lists_are_read_to_their_end(world: World, client: Client) -> None:
    ids = [world.submit() for _ in range(205)]
    assert [job["id"] for job in printed("list")["jobs"]] == ids[::-1]
    assert len(run("list").splitlines()) == 205
    with world.database.write() as session:
        row = find_job(session, ids[0])
        for number in range(450):
            add_event(session, row, "note", f"number {number}", now=1.0)
    found = printed("events", ids[0])
    assert [event["seq"] for event in found["events"]] == list(range(1, 452)) and found["next_after"] == 451
    assert len(run("events", ids[0]).splitlines()) == 451


def test_programs_get_one_document(world: World, client: Client, tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    assert printed("submit", spec)["state"] == "SUBMITTED"
    assert set(printed("version")) == {"version"}
    job = finished(world)
    lines = [json.loads(line) for line in run("events", job, "--follow", "--json").splitlines()]
    assert lines[0]["kind"] == "submitted" and lines[-1]["state"] == "SUCCEEDED"


def test_following_a_submission_for_a_program(
    world: World, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any) -> None:
        (job,) = world.client.get("/v1/jobs").json()["jobs"]
        world.client.post(f"/v1/jobs/{job['id']}:cancel")

    monkeypatch.setattr("orchestrator.cli.follow.time.sleep", end)
    assert printed("submit", write_spec(tmp_path), "--follow", code=1)["state"] == "CANCELLED"


def test_exit_codes_of_bad_input(client: Client, tmp_path: Path) -> None:
    run("submit", str(tmp_path / "absent.yaml"), code=2)
    (tmp_path / "bad.yaml").write_text("api_version: v1\nnaem: x\n")
    assert "/naem" in run("submit", str(tmp_path / "bad.yaml"), code=2)
    run("get", "none", code=2)
    run("trip", "cublas", "--reason", "x", code=2)
    run("nothing", code=2)


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMUON_STATE_DIR", str(tmp_path))
    assert "dmuonctl up" in run("list", "--url", "http://127.0.0.1:9", code=1)


def finished(world: World, *, broken: bool = False) -> str:
    job = world.running()
    first = make_report(0, 1, matrices=0 if broken else None, loss=5.0)
    world.attempt(job).push(first, make_report(1, 1, loss=5.0), *(make_report(rank, 2) for rank in (0, 1)))
    if broken:
        world.attempt(job).push(make_report(0, 3, matrices=0), make_report(1, 3))
    world.attempt(job).end(Reason.COMPLETED, "all steps done")
    world.turn()
    return job


def shown(client: Client, job: str) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render_report(collect_report(client, job)))
    return console.export_text()


def test_closing_table(world: World, client: Client) -> None:
    text = shown(client, finished(world))
    assert "SUCCEEDED" in text and "loss 5 -> 2" in text
    assert "matrices planned 6, counted 6; routes verified" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and line.strip()}
    assert "83.3%" in rows["muon"] and "6 kB" in rows["muon"]
    assert "33.3%" in rows["0"] and "gram" in rows["cublas"]


def test_closing_table_of_a_job_that_did_not_run_as_planned(world: World, client: Client) -> None:
    text = shown(client, finished(world, broken=True))
    assert "NOT AS PLANNED" in text and "0 matrices orthogonalised, 9 planned" in text


def test_following_until_the_end(world: World, client: Client, tmp_path: Path) -> None:
    job = world.running()
    stop = threading.Event()

    def work() -> None:
        world.attempt(job).steps(1, 2, 3)
        world.turn()
        stop.wait(1.0)
        world.attempt(job).end(Reason.USER_ERROR, "boom")
        world.turn()

    worker = threading.Thread(target=work)
    worker.start()
    output = run("get", job, "--follow", code=1)
    worker.join()
    assert "FAILED" in output and "boom" in output


def test_following_has_an_end(world: World, client: Client) -> None:
    job = world.running()
    with pytest.raises(FollowTimeout, match="RUNNING"):
        follow(client, job, Console(quiet=True), detach_hint="", deadline=0.0)


def test_control_c_detaches_and_says_how_to_come_back(
    world: World, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.cli.follow.time.sleep", interrupt)
    output = run("submit", write_spec(tmp_path), "--follow")
    assert "dmuonctl get" in output and "goes on" in output
    assert world.client.get("/v1/jobs").json()["jobs"][0]["state"] == "SUBMITTED"


def test_kernels_are_steered_from_the_command_line(world: World, client: Client) -> None:
    job = world.running()
    said = run("swap", job, "--kernel", "blocked", "--algorithm", "direct", "--reason", "better", "--wait", "0")
    assert "kernel blocked, algorithm direct: requested" in said
    assert "goes on at a time" in run("swap", job, "--kernel", "cublas", "--reason", "x", code=2)
    run("swap", job, "--reason", "nothing asked", code=2)
    assert "disabled (epoch 2)" in run("disable", "quack", "--reason", "pin it", "--expires-in", "60")
    run("disable", "quack", "--reason", "without an end", code=2)
    for words in (("trip", "quack"), ("observe", "quack"), ("reset", "quack"), ("swap", job, "--kernel", "cublas")):
        assert "--reason: String should have at least 1 character, found ' '" in run(*words, "--reason", " ", code=2)
    said = run("force", "quack", "--reason", "x", "--expires-in", "1e9", code=2)
    assert "--expires-in: Input should be less than or equal to 2592000, found" in said
    assert "metrics_only" in run("observe", "blocked", "--reason", "look", "--scope", job)
    shown = run("breaker", "quack")
    assert "closed -> disabled" in shown and "pin it" in shown
    assert "forced_open" in run("force", "quack", "--reason", "fallback") and "closed" in run(
        "reset", "quack", "--reason", "over"
    )
