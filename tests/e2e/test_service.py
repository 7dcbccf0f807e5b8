"""What a user does with a running service: switch a kernel, cancel, send nonsense, ask for too much."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator import resources as r
from orchestrator.cli.own_service import OwnService
from orchestrator.client import Client, StreamEnd
from orchestrator.errors import RequestRefused
from tests.e2e.jobs import small, submit, wait_for, wait_until_ended

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]


def launches(client: Client, job_id: str) -> dict[str, int]:
    counted: dict[str, int] = {}
    for entry in client.routes(job_id).ns:
        counted[entry.kernel] = counted.get(entry.kernel, 0) + entry.launches
    return counted


def swapped(client: Client, job_id: str, **target: Any) -> r.SwapResource:
    """Ask for a swap and wait for its end."""
    asked = client.swap(job_id, r.SwapRequest(reason="a test", **target))
    deadline = time.monotonic() + 60
    while not asked.final and time.monotonic() < deadline:
        time.sleep(0.1)
        asked = client.swap_state(job_id, asked.id)
    return asked


def test_a_breaker_and_swaps_change_what_a_running_job_launches(service: OwnService) -> None:
    with service.client() as client:
        job = submit(client, small(kernels={"kernel": "blocked"}, training={"steps": 4000}))
        wait_for(client, job.id, lambda seen: seen.progress.step >= 5)
        assert set(launches(client, job.id)) == {"blocked"}
        client.change_breaker("blocked", r.BreakerChange(action="trip", reason="a test", scope=job.id))
        seen = wait_for(client, job.id, lambda _: launches(client, job.id).get("cublas", 0) > 0)
        before = launches(client, job.id)
        wait_for(client, job.id, lambda now: now.progress.step >= seen.progress.step + 20)
        after = launches(client, job.id)
        assert after["blocked"] == before["blocked"], "nothing goes to a kernel whose breaker is open"
        assert after["cublas"] > before["cublas"]
        changed = [e for e in client.events(job.id).events if e.kind == "kernel_changed"]
        assert len(changed) == 1 and "cublas" in changed[0].message
        client.change_breaker("blocked", r.BreakerChange(action="reset", reason="the test is over", scope=job.id))
        wait_for(client, job.id, lambda _: launches(client, job.id)["blocked"] > after["blocked"])

        done = swapped(client, job.id, kernel="cublas", algorithm="direct")
        assert done.state == "committed" and done.step is not None and done.epoch is not None, done
        here = {entry.algorithm for entry in client.routes(job.id).ns if entry.kernel == "cublas"}
        assert "direct" in here
        refused = swapped(client, job.id, kernel="quack")
        assert refused.state == "rolled_back" and "needs an SM90+ CUDA device, found cpu" in refused.message, refused
        seen = wait_for(client, job.id, lambda now: now.progress.step > (done.step or 0) + 20)
        kinds = [event.kind for event in client.events(job.id).events]
        assert kinds.count("swap_committed") == kinds.count("swap_rolled_back") == 1 and not seen.terminal
        verification = client.routes(job.id).verification
        assert verification is not None and verification.status == "True", "a switch loses no matrix"
        client.cancel(job.id)
        wait_until_ended(client, job.id)


def worker_processes() -> set[int]:
    """Ids of processes that Ray started for ranks and supervisors on this machine."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words and words[0].startswith(("ray::Supervisor", "ray::Rank")):
            found.add(process.pid)
    return found


def test_cancel_ends_the_processes_and_frees_the_room(service: OwnService) -> None:
    with service.client() as client:
        before = worker_processes()
        job = submit(client, small(training={"steps": 100_000}))
        wait_for(client, job.id, lambda seen: seen.progress.step >= 3)
        assert len(worker_processes() - before) == 3, "two ranks and their supervisor"
        client.cancel(job.id)
        ended = wait_until_ended(client, job.id)
        assert (ended.state, ended.reason) == ("CANCELLED", "cancelled")
        deadline = time.monotonic() + 10
        while worker_processes() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert worker_processes() <= before
        *pages, end = client.stream_logs(job.id)
        assert isinstance(end, StreamEnd) and end.state == "CANCELLED", "what a killed rank wrote is told to its end"
        lines = [line for page in pages if isinstance(page, r.LogPage) for line in page.lines]
        told = {(line.rank, line.text.partition(":")[0]) for line in lines}
        assert {(rank, f"rank {rank} of attempt 1 of job {job.id}") for rank in (0, 1)} <= told
        again = submit(client, small(training={"steps": 2}))
        assert wait_until_ended(client, again.id).state == "SUCCEEDED", "the room is free again"


def steps_of(client: Client, job_id: str, attempt: int) -> list[int]:
    found: list[int] = []
    while points := client.metrics(job_id, after=found[-1] if found else 0, attempt=attempt).points:
        found += [point.step for point in points]
    return found


def test_jobs_that_need_the_whole_machine_wait_or_give_way(service: OwnService) -> None:
    """Case 17: a job that has to wait says so and is not failed. One of a higher priority takes the place of the first,
    which saves, releases its room, and goes on from there before the one that waited behind it."""
    with service.client() as client:
        first = submit(client, small(training={"steps": 400}))
        wait_for(client, first.id, lambda seen: seen.progress.step >= 1)
        second = submit(client, small(training={"steps": 2}))
        waiting = wait_for(client, second.id, lambda seen: seen.state == "QUEUED" and "CPU" in seen.message)
        assert waiting.reason is None
        admitted = next(condition for condition in waiting.conditions if condition.type == "Admitted")
        assert (admitted.status, admitted.reason) == ("False", "waiting_for_capacity")
        urgent = submit(client, small(priority=10, training={"steps": 2}))
        assert wait_until_ended(client, urgent.id).state == "SUCCEEDED"
        assert not client.job(first.id).terminal, "it was to give way in its middle"
        ended = [wait_until_ended(client, job.id) for job in (first, second)]
        assert [job.state for job in ended] == ["SUCCEEDED", "SUCCEEDED"]
        assert [attempt.end_reason for attempt in ended[0].attempts] == ["preempted", "completed"]
        saved = [event for event in client.events(first.id).events if event.kind == "checkpoint_saved"]
        step = int(str(saved[0].data["step"]))
        assert steps_of(client, first.id, 1) == list(range(1, step + 1)), "it saved the last step that it did"
        assert steps_of(client, first.id, 2) == list(range(step + 1, 401)), "none is lost or done twice"
        begun = [client.job(job.id).attempts[-1].created_at for job in (urgent, first, second)]
        assert begun == sorted(begun), "it keeps its place in the queue"


def _empty_file(folder: Path) -> str:
    path = folder / "empty.txt"
    path.write_text("")
    return str(path)


def _short_file(folder: Path) -> str:
    path = folder / "short.txt"
    path.write_text("few bytes")
    return str(path)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown field": ({"training": {"stepz": 3}}, "/training/stepz", "Did you mean"),
    "NaN": ({"training": {"clip_grad_norm": float("nan")}}, "/training/clip_grad_norm", "finite"),
    "overflow": ({"training": {"clip_grad_norm": float("inf")}}, "/training/clip_grad_norm", "finite"),
    "unknown route": ({"routing": {"defaults": {"route": "moon"}}}, "/routing/defaults/route", "'muon'"),
    "norm on muon": ({"routing": {"overrides": []}}, "/routing", "norm"),
    "too many workers": ({"mesh": {"shard": 64}, "training": {"global_batch": 64}}, "/", "64"),
    "missing path": ({"data": {"files": ["/nowhere/*.txt"]}}, "/data/files", "/nowhere"),
    "empty corpus": ({"data": {"files": ["{empty}"]}}, "/data/files", "empty"),
    "short corpus": ({"data": {"files": ["{short}"]}}, "/data/sequence_length", "9"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_refused_before_any_worker_starts(service: OwnService, tmp_path: Path, name: str) -> None:
    changes, pointer, said = BAD[name]
    document = small(**changes)
    if files := document["data"].get("files"):
        names = {"{empty}": _empty_file(tmp_path), "{short}": _short_file(tmp_path)}
        document["data"]["files"] = [names.get(file, file) for file in files]
    with service.client() as client:
        try:
            job = submit(client, document)
        except RequestRefused as error:
            found = list(error.problem.errors)
        else:
            ended = wait_until_ended(client, job.id)
            assert ended.state == "FAILED" and not ended.attempts, "no worker was started"
            found = list(ended.errors)
    matching = [error for error in found if error.pointer.startswith(pointer)]
    assert matching, found
    text = " ".join(f"{error.message} {error.suggestion or ''}" for error in matching)
    assert said in text, text


def test_an_error_of_a_worker_reaches_the_reason(service: OwnService) -> None:
    """Class, message and rank: here a loss that overflows at once, with the job told to raise."""
    document = small(optimizer={"muon": {"lr": 1e30}, "adamw": {"lr": 1e30}}, failure={"non_finite": "raise"})
    with service.client() as client:
        job = submit(client, document)
        ended = wait_until_ended(client, job.id)
    assert (ended.state, ended.reason, ended.blame) == ("FAILED", "non_finite", "user")
    assert ended.rank_errors and ended.rank_errors[0].ranks
    assert "NonFinite" in ended.rank_errors[0].type
