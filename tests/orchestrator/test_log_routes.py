"""Logs over HTTP: pages, streams that resume without gap or repeat, several attempts, bytes that are no text."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.cli.logs import printable
from tests.orchestrator.conftest import World
from tests.orchestrator.test_api import parse, problem
from worker.contract.logs import LogStream, attempt_folder, done_file, dropped_file, log_file
from worker.contract.states import Reason


def write(world: World, job_id: str, rank: int, data: bytes, *, stream: LogStream = "stdout") -> None:
    folder = attempt_folder(world.settings.state_dir / "logs" / job_id, 1)
    folder.mkdir(parents=True, exist_ok=True)
    with log_file(folder, rank, stream).open("ab") as file:
        file.write(data)
    done_file(folder, rank).touch()


def ended(world: World) -> str:
    job_id = world.running()
    start = world.attempt(job_id).start
    assert start.log_directory == str(world.settings.state_dir / "logs" / job_id)
    assert start.log_quota_bytes == world.settings.log_quota_bytes
    write(world, job_id, 0, b"".join(b"line %d \xff \xc3\xa9\r\n" % number for number in range(2000)))
    write(world, job_id, 1, b"x" * 50_000 + b"\nlast")
    world.attempt(job_id).end(Reason.COMPLETED, "done")
    world.turn()
    return job_id


def stream(world: World, job_id: str, after: str | None = None, query: str = "") -> list[dict[str, Any]]:
    headers = {"Accept": "text/event-stream"} | ({} if after is None else {"Last-Event-ID": after})
    return parse(world.client.get(f"/v1/jobs/{job_id}/logs{query}", headers=headers).text)


def test_pages_and_streams_tell_the_same(world: World) -> None:
    job_id = ended(world)
    lines, after = list[dict[str, Any]](), ""
    while True:
        params = {"limit_bytes": "9000"} | ({"after": after} if after else {})
        page = world.client.get(f"/v1/jobs/{job_id}/logs", params=params).json()
        lines, after = lines + page["lines"], page["next_after"]
        if page["drained"]:
            break
    streamed = stream(world, job_id)
    assert json.loads(streamed[-1]["data"])["state"] == "SUCCEEDED" and streamed[-1]["event"] == "end"
    told = [line for event in streamed[:-1] for line in json.loads(event["data"])["lines"]]
    key = lambda line: (line["rank"], line["stream"], line["offset"])  # noqa: E731
    assert sorted(lines, key=key) == sorted(told, key=key)
    assert lines[1]["text"] == "line 1 \N{REPLACEMENT CHARACTER} é" and not lines[1]["partial"]
    wide = [line for line in lines if line["rank"] == 1]
    assert "".join(line["text"] for line in wide) == "x" * 50_000 + "last"
    assert [line["partial"] for line in wide] == [True, True, True, False, False]
    for event in streamed[:-1]:  # wherever a follower was cut off, the rest follows
        again = stream(world, job_id, event["id"])
        rest = [line for part in again[:-1] for line in json.loads(part["data"])["lines"]]
        assert rest == told[len(told) - len(rest) :]
        done = [line for line in told if line not in rest]
        assert len(done) + len(rest) == len(told)


def test_filters_and_mistakes(world: World) -> None:
    job_id = ended(world)
    folder = attempt_folder(world.settings.state_dir / "logs" / job_id, 1)
    write(world, job_id, 1, b"oops\n", stream="stderr")
    dropped_file(folder, 1, "stderr").write_text("12")
    page = world.client.get(f"/v1/jobs/{job_id}/logs?rank=1&stream=stderr&attempt=1").json()
    assert [line["text"] for line in page["lines"]] == ["oops"]
    assert page["dropped"] == [{"rank": 1, "stream": "stderr", "dropped_bytes": 12}]
    problem(world.client.get(f"/v1/jobs/{job_id}/logs?attempt=2"), 404, "not_found")
    problem(world.client.get(f"/v1/jobs/{job_id}/logs?after=2;0.stdout=1"), 404, "not_found")
    problem(world.client.get("/v1/jobs/none/logs"), 404, "not_found")
    problem(world.client.get(f"/v1/jobs/{job_id}/logs?after=../../etc"), 422, "invalid_input")
    problem(world.client.get(f"/v1/jobs/{job_id}/logs?stream=stdin"), 422, "invalid_input")
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "x"}
    problem(world.client.get(f"/v1/jobs/{job_id}/logs", headers=headers), 422, "invalid_input")


def test_a_job_that_has_written_nothing(world: World) -> None:
    job_id = world.submit()
    page = world.client.get(f"/v1/jobs/{job_id}/logs").json()
    assert (page["lines"], page["next_after"], page["drained"]) == ([], "1", False)
    world.client.post(f"/v1/jobs/{job_id}:cancel")
    assert [event["event"] for event in stream(world, job_id)] == ["end"]


def test_output_does_not_steer_a_terminal() -> None:
    text = "a\x1b[2J\x1b]0;title\x07b\x1b[31mred\x1b[0m\tc\x9b\x00"
    assert printable(text) == "abred\tc" + 2 * "\N{REPLACEMENT CHARACTER}"
