"""Quotas, the audit, explanations and checkpoints over HTTP, and what a pass of admission writes."""

from __future__ import annotations

import hashlib

from sqlalchemy import event
from sqlalchemy.engine import Engine

from orchestrator.api.auth import Authenticator
from orchestrator.launcher_api import Resources
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import make_spec
from tests.orchestrator.test_api import SPEC, problem
from worker.contract.messages import Milestone
from worker.contract.states import Reason


def explained(world: World, job_id: str) -> dict[str, object]:
    answer = world.client.get(f"/v1/jobs/{job_id}:explain")
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def codes(found: dict[str, object]) -> list[str]:
    causes = found["causes"]
    assert isinstance(causes, list)
    return [cause["code"] for cause in causes]


def test_quotas_are_set_read_and_kept(world: World) -> None:
    path = "/v1/quotas/default"
    problem(world.client.get(path), 404, "not_found")
    answer = world.client.put(path, json={"cpus": 2, "jobs": 1})
    assert (answer.json()["cpus"], answer.json()["gpus"], answer.headers["etag"]) == (2.0, None, '"1"')
    problem(world.client.put(path, json={"cpus": 1}, headers={"If-Match": '"0"'}), 412, "precondition_failed")
    assert world.client.put(path, json={"cpus": 2}, headers={"If-Match": '"1"'}).headers["etag"] == '"2"'
    problem(world.client.put(path, json={"cpus": -1, "gpu": 3}), 422, "invalid_input")
    problem(world.client.put("/v1/quotas/Not-A-Project", json={}), 422, "invalid_input")
    first, second = world.running(), world.submit()
    world.turn()
    assert world.job(second)["message"] == "project default may use 2 CPUs, of which 2 are used and this job asks for 2"
    found = explained(world, second)
    assert codes(found)[0] == "waiting_for_quota" and found["ahead"] == 0
    listed = world.client.get("/v1/quotas").json()
    assert listed["used"]["default"] == {"cpus": 2.0, "gpus": 0.0, "memory_bytes": 0.0, "jobs": 1}
    world.client.put("/v1/quotas/*", json={"cpus": 1})
    other = world.submit(project="other")
    world.turn()
    assert world.state(other) == "FAILED" and world.job(other)["reason"] == "infeasible"
    world.attempt(first).end(Reason.COMPLETED)
    world.turn(2)
    assert world.state(second) == "STARTING"


def test_none_gives_way_to_a_job_that_its_quota_holds_back(world: World) -> None:
    world.client.put("/v1/quotas/small", json={"cpus": 2})
    held, low = world.running(project="small"), world.running()
    world.launcher.free = Resources()
    high = world.submit(project="small", priority=9)
    world.turn(2)
    assert (world.state(held), world.state(low), world.state(high)) == ("RUNNING", "RUNNING", "QUEUED")
    world.client.put("/v1/quotas/small", json={"cpus": 4})
    world.turn(2)
    assert "STOPPING" in (world.state(held), world.state(low)), "with the quota raised it has its priority"


def test_a_project_whose_queue_is_full(world: World) -> None:
    world.client.put("/v1/quotas/default", json={"waiting_jobs": 2})
    world.launcher.free = Resources()
    for _ in range(2):
        world.submit()
    found = problem(world.client.post("/v1/jobs", json=SPEC), 429, "quota_exceeded")
    assert "2 jobs of project default wait" in found["detail"]
    assert world.client.post("/v1/jobs", json=SPEC | {"project": "other"}).status_code == 201


def test_case_17_why_a_job_waits(world: World) -> None:
    huge = world.submit(resources={"cpus_per_worker": 64})
    first = world.running()
    world.launcher.free = Resources(2.0)
    second = world.submit(mesh={"shard": 4})
    world.turn()
    assert (world.state(huge), world.job(huge)["reason"]) == ("FAILED", "infeasible")
    found = explained(world, huge)
    assert codes(found)[:2] == ["infeasible", "infeasible"] and "64 CPUs" in str(found["summary"])
    found = explained(world, second)
    assert codes(found)[0] == "waiting_for_capacity" and "2 CPUs" in str(found["summary"])
    world.launcher.unreachable = True
    world.turn()
    assert codes(explained(world, second))[0] == "launcher_unavailable"
    assert codes(explained(world, first)) == ["launcher_unavailable"], "that alone changes nothing about what runs"
    assert world.state(first) == "RUNNING"


def test_why_a_job_failed_and_what_it_saved(world: World) -> None:
    job_id = world.running()
    data = {"step": 4, "path": str(world.settings.state_dir / "gone"), "bytes": 10, "seconds": 0.5}
    saved = {"name": "checkpoint_saved", "at": 5.0, "message": "saved", "rank": 0, "data": data}
    world.attempt(job_id).push(Milestone.model_validate(saved))
    world.attempt(job_id).fail(1, ValueError("a bad batch"))
    world.attempt(job_id).end(Reason.USER_ERROR, "rank 1 raised")
    world.turn()
    found = explained(world, job_id)
    assert codes(found)[:2] == ["user_error", "rank_error"] and "at fault: user" in str(found["summary"])
    listed = world.client.get(f"/v1/jobs/{job_id}/checkpoints").json()["checkpoints"]
    assert [(entry["step"], entry["attempt"], entry["present"]) for entry in listed] == [(4, 1, False)]
    problem(world.client.get("/v1/jobs/none:explain"), 404, "not_found")
    problem(world.client.get("/v1/jobs/none/checkpoints"), 404, "not_found")


def test_why_a_job_is_slow(world: World) -> None:
    job_id = world.running()
    world.attempt(job_id).steps(1, 2)
    world.client.put("/v1/kernels/quack/breaker", json={"action": "trip", "reason": "slow"})
    world.turn()
    assert codes(explained(world, job_id)) == ["kernel_fallback"]


def test_changes_are_on_record(world: World) -> None:
    job_id = world.submit()
    world.client.post(f"/v1/jobs/{job_id}:cancel")
    world.client.post(f"/v1/jobs/{job_id}:cancel")
    world.client.post("/v1/jobs/none:cancel")
    world.client.put("/v1/quotas/p", json={"jobs": 1})
    entries = world.client.get("/v1/audit").json()["entries"]
    assert [(entry["action"], entry["target"], entry["outcome"]) for entry in entries] == [
        ("PUT /v1/quotas/p", "p", "200"),
        ("POST /v1/jobs/none:cancel", "", "not_found"),
        (f"POST /v1/jobs/{job_id}:cancel", job_id, "200"),
        (f"POST /v1/jobs/{job_id}:cancel", job_id, "200"),
        ("POST /v1/jobs", job_id, "201"),
    ]
    token = world.settings.token_file.read_text().split()[0]
    assert all(entry["actor"].startswith("token-") and token not in str(entry) for entry in entries)
    page = world.client.get("/v1/audit?limit=2").json()
    assert page["next_before"] == entries[1]["number"]
    rest = world.client.get(f"/v1/audit?before={page['next_before']}&limit=9&target={job_id}").json()
    assert [entry["number"] for entry in rest["entries"]] == [entry["number"] for entry in entries[2:]]


def test_who_was_turned_away_is_on_record_and_no_flood_is(world: World) -> None:
    token = world.settings.token_file.read_text().split()[0]
    with world.settings.token_file.open("a") as file:
        file.write("only-reads jobs:read\n")
    world.app.state.service.authenticator._principals.update(
        Authenticator.from_file(world.settings.token_file)._principals
    )
    ask = lambda headers: world.client.get("/v1/audit?secret=hidden", headers=headers)  # noqa: E731
    problem(ask({"Authorization": "Bearer only-reads"}), 403, "forbidden")
    problem(ask({"Authorization": f"Bearer {token}x"}), 401, "unauthorized")
    problem(ask({"Authorization": ""}), 401, "unauthorized")
    known = hashlib.sha256(b"only-reads").hexdigest()[:8]
    tried = hashlib.sha256(f"{token}x".encode()).hexdigest()[:8]
    entries = world.client.get("/v1/audit").json()["entries"]
    assert [(entry["actor"], entry["outcome"]) for entry in entries] == [
        ("nobody@testclient", "unauthorized"), (f"unknown-{tried}@testclient", "unauthorized"),
        (f"token-{known}", "forbidden"),
    ]  # fmt: skip
    assert {entry["action"] for entry in entries} == {"GET /v1/audit"} and "hidden" not in str(entries)
    for _ in range(30):
        ask({"Authorization": "Bearer guess"})
    assert len(world.client.get("/v1/audit").json()["entries"]) == 5, "five a second"
    world.clock.advance(1)
    ask({"Authorization": "Bearer guess"})
    assert world.client.get("/v1/audit").json()["entries"][0]["outcome"] == "unauthorized (and 28 of anyone before it)"
    with world.database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE audit")
    world.clock.advance(1)
    problem(ask({"Authorization": "Bearer guess"}), 401, "unauthorized")


def test_a_job_that_moved_on_is_not_cancelled_paused_or_resumed_by_who_names_its_version(world: World) -> None:
    job_id = world.running()
    tag = world.client.get(f"/v1/jobs/{job_id}").headers["ETag"]
    world.attempt(job_id).steps(1)
    world.turn()
    for verb, old in (("pause", '"1"'), ("resume", '"1", "2"'), ("cancel", "1")):
        answer = world.client.post(f"/v1/jobs/{job_id}:{verb}", headers={"If-Match": old, "Idempotency-Key": verb})
        found = problem(answer, 412, "precondition_failed")
        assert tag in found["detail"] and world.state(job_id) == "RUNNING"
    headers = {"If-Match": f'"1", {tag}', "Idempotency-Key": "right"}
    assert world.client.post(f"/v1/jobs/{job_id}:pause", headers=headers).json()["state"] == "STOPPING"
    again = world.client.post(f"/v1/jobs/{job_id}:pause", headers=headers)
    assert again.status_code == 200 and again.headers["Idempotent-Replayed"] == "true"
    any_version = world.client.post(f"/v1/jobs/{job_id}:cancel", headers={"If-Match": "*"})
    assert any_version.json()["reason"] == "cancelled"


def test_a_pass_over_a_long_queue_writes_only_news(world: World) -> None:
    world.launcher.free = Resources()
    for _ in range(60):
        world.submit()
    world.turn(8)
    written: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if statement.startswith(("INSERT", "UPDATE")):
            written.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        world.reconciler.run_once()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert len([text for text in written if "leases" not in text]) == 0, written
    world.launcher.free = None
    world.launcher.total = Resources(120.0)
    assert world.reconciler.run_once() is None
    states = [job["state"] for job in world.client.get("/v1/jobs?page_size=100").json()["jobs"]]
    assert states == ["STARTING"] * 60
    assert make_spec().world_size * 60 == 120
