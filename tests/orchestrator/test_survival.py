"""Jobs that stop for a while: restarts, pauses and preemptions through the whole control plane but for Ray."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import select

from orchestrator.launcher_api import Resources
from orchestrator.store.models import Job
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import make_spec
from worker.contract.messages import AttemptEnd, StopRequest
from worker.contract.spec import JobSpec
from worker.contract.states import Reason


def restarts(world: World, job_id: str) -> dict[str, object]:
    conditions = world.job(job_id)["conditions"]
    assert isinstance(conditions, list)
    (found,) = [entry for entry in conditions if entry["type"] == "Restarting"]
    return dict(found)


def form(world: World, job_id: str, number: int) -> None:
    world.attempt(job_id, number).milestone("placed")
    world.attempt(job_id, number).milestone("group_formed")
    world.turn()
    assert world.state(job_id) == "RUNNING"


def ask(world: World, job_id: str, verb: str, expected: int = 200) -> str:
    answer = world.client.post(f"/v1/jobs/{job_id}:{verb}")
    assert answer.status_code == expected, answer.text
    return str(answer.json().get("state") or answer.json()["code"])


def test_a_lost_worker_starts_another_attempt_after_its_pause(world: World) -> None:
    job_id = world.running()
    world.attempt(job_id).steps(1, 2)
    world.attempt(job_id).end(Reason.WORKER_LOST, "the process of rank 1 is gone")
    world.turn(2)
    job = world.job(job_id)
    assert (job["state"], job["reason"]) == ("RESTARTING", None)
    assert world.attempt(job_id).left, "the supervisor was let go"
    data = restarts(world, job_id)["data"]
    assert isinstance(data, dict) and (data["restarts"], data["budget"]) == (1, 3)
    world.clock.advance(1.9)
    world.turn(3)
    assert world.state(job_id) == "RESTARTING" and len(world.launcher.attempts) == 1
    world.clock.advance(0.2)
    world.turn(2)
    assert world.state(job_id) == "STARTING"
    first, second = world.attempt(job_id), world.attempt(job_id, 2)
    assert first.start.fence != second.start.fence
    assert first.start.checkpoint_directory == second.start.checkpoint_directory
    form(world, job_id, 2)
    second.end(Reason.COMPLETED)
    world.turn(2)
    job = world.job(job_id)
    assert (job["state"], job["reason"]) == ("SUCCEEDED", "completed")
    assert [attempt["end_reason"] for attempt in job["attempts"]] == ["worker_lost", "completed"]  # type: ignore[index]


def test_a_user_error_is_not_tried_again(world: World) -> None:
    job_id = world.running()
    world.attempt(job_id).end(Reason.USER_ERROR, "rank 0: ValueError: no")
    world.turn(2)
    world.clock.advance(10_000)
    world.turn(3)
    job = world.job(job_id)
    assert (job["state"], job["reason"]) == ("FAILED", "user_error") and len(world.launcher.attempts) == 1


def test_a_job_between_attempts_can_be_cancelled_and_paused(world: World) -> None:
    for verb, state in (("cancel", "CANCELLED"), ("pause", "PAUSED")):
        job_id = world.running()
        world.attempt(job_id).end(Reason.WORKER_LOST)
        world.turn(2)
        assert ask(world, job_id, verb) == state
        world.clock.advance(100)
        world.turn(3)
        assert world.state(job_id) == state
        assert (job_id, 2) not in world.launcher.attempts


def test_pause_saves_and_releases_and_resume_goes_on(world: World) -> None:
    job_id = world.running(failure={"stop_patience_s": 33.0})
    assert [ask(world, job_id, "pause") for _ in range(2)] == ["STOPPING", "STOPPING"]
    assert ask(world, job_id, "resume", 409) == "conflict"
    world.turn()
    stops: list[StopRequest] = world.attempt(job_id).stops
    assert [(stop.reason, stop.patience_s) for stop in stops] == [(Reason.PAUSED, 33.0)]
    world.attempt(job_id).end(Reason.PAUSED)
    world.turn(2)
    assert world.state(job_id) == "PAUSED" and world.attempt(job_id).left
    world.clock.advance(100_000)
    world.turn(3)
    assert world.state(job_id) == ask(world, job_id, "pause") == "PAUSED", "it waits for as long as it takes"
    assert ask(world, job_id, "resume") == "QUEUED"
    world.turn()
    assert ask(world, job_id, "resume") == "STARTING", "asking again changes nothing"
    form(world, job_id, 2)


def test_pausing_what_only_waits_or_has_ended(world: World) -> None:
    job_id = world.submit()
    assert ask(world, job_id, "pause", 409) == "conflict", "it has no plan yet"
    world.launcher.free = Resources()
    world.turn()
    assert ask(world, job_id, "pause") == "PAUSED"
    assert ask(world, job_id, "cancel") == "CANCELLED"
    assert ask(world, job_id, "pause", 409) == ask(world, job_id, "resume", 409) == "job_finished"


@pytest.mark.parametrize("end", [AttemptEnd(at=3.0, reason=Reason.PAUSED, message=""), None])
def test_cancelled_while_it_pauses(world: World, end: AttemptEnd | None) -> None:
    job_id = world.running()
    ask(world, job_id, "pause")
    world.turn()
    assert ask(world, job_id, "cancel") == "STOPPING"
    if end is None:
        world.attempt(job_id).dead = True
    else:
        world.attempt(job_id).push(end)
    world.turn(2)
    job = world.job(job_id)
    assert (job["state"], job["reason"]) == ("CANCELLED", "cancelled")


def test_work_that_was_done_is_done_although_somebody_paused_it(world: World) -> None:
    job_id = world.running()
    ask(world, job_id, "pause")
    world.attempt(job_id).end(Reason.COMPLETED)
    world.turn(2)
    assert world.state(job_id) == "SUCCEEDED"


def test_a_job_gives_way_to_one_of_a_higher_priority_and_comes_back(world: World) -> None:
    low = world.running(priority=-1)
    world.launcher.free = Resources()
    high = world.submit(priority=5)
    world.turn(2)
    assert (world.state(low), world.state(high)) == ("STOPPING", "QUEUED")
    assert [stop.reason for stop in world.attempt(low).stops] == [Reason.PREEMPTED]
    world.turn(3)
    world.attempt(low).end(Reason.PREEMPTED)
    world.launcher.free = Resources(cpus=2.0)
    world.turn(2)
    assert (world.state(low), world.state(high)) == ("QUEUED", "STARTING")
    world.launcher.free = Resources()
    form(world, high, 1)
    world.turn(2)
    assert world.state(low) == "QUEUED"
    world.attempt(high).end(Reason.COMPLETED)
    world.launcher.free = Resources(cpus=2.0)
    world.turn(2)
    assert world.state(low) == "STARTING"
    form(world, low, 2)


def test_a_spec_that_an_earlier_version_accepted_is_read_as_it_is(world: World) -> None:
    both = {"algorithm": "direct", "restarts": [2]}
    answer = world.client.post("/v1/jobs", json=make_spec().model_dump(mode="json") | {"kernels": both})
    assert answer.status_code == 422 and [entry["pointer"] for entry in answer.json()["errors"]] == [
        "/kernels/restarts"
    ]
    running, ended = world.running(), world.running()
    world.attempt(ended).end(Reason.COMPLETED)
    world.turn(2)
    waiting, other = world.submit(), world.submit()
    with world.database.write() as session:
        for job in session.scalars(select(Job).where(Job.id != other)):
            job.spec = json.dumps(json.loads(job.spec) | {"kernels": both})
    world.turn()
    listed = {job["id"]: job["state"] for job in world.client.get("/v1/jobs").json()["jobs"]}
    assert listed == {running: "RUNNING", ended: "SUCCEEDED", waiting: "STARTING", other: "STARTING"}
    assert world.client.get("/metrics").status_code == 200
    word = {"kernel": "cublas", "reason": "try"}
    assert world.client.post(f"/v1/jobs/{running}/kernel-swaps", json=word).status_code == 202
    read = JobSpec.model_validate_json(world.attempt(waiting).start.spec_json)  # as its worker does
    assert read.kernels.restarts == (2,)
