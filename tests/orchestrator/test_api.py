"""The HTTP side: problems, keys, pages, streams, tokens."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from orchestrator.api.app import create_app
from orchestrator.errors import PROBLEM_TYPE
from orchestrator.settings import Settings
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import FakeClock, FakeLauncher, FakePlanner, make_report, make_spec
from tests.orchestrator.postgres import Postgres
from worker.contract.errors import FieldError
from worker.contract.states import Reason

SPEC = make_spec().model_dump(mode="json", exclude_unset=True)


def problem(answer: Any, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM_TYPE
    found: dict[str, Any] = answer.json()
    assert (found["code"], found["status"], found["type"]) == (code, status, f"urn:dmuon:problem:{code}")
    return found


def test_case_22_the_same_submission_twenty_times_at_once(world: World) -> None:
    """On both databases: one job, the same answer to all, and no error for who came second."""

    def post(_: int) -> Any:
        return world.client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "one"})

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.text for answer in answers}) == 1
    assert sum("Idempotent-Replayed" in answer.headers for answer in answers) == 19
    assert len(world.client.get("/v1/jobs").json()["jobs"]) == 1
    assert len(world.client.get("/v1/audit").json()["entries"]) == 1
    problem(post_other(world), 422, "idempotency_mismatch")


def post_other(world: World) -> Any:
    return world.client.post("/v1/jobs", json=SPEC | {"name": "other"}, headers={"Idempotency-Key": "one"})


def test_a_database_that_went_away_is_a_503(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.migrated()
    settings = Settings(state_dir=tmp_path, database=url, auth=False)
    app = create_app(settings, FakeLauncher(), FakePlanner(), FakeClock(), reconcile=False)
    client = TestClient(app)
    assert client.get("/v1/jobs").status_code == 200
    postgres.rename(url)
    postgres.drop_connections()
    problem(client.get("/v1/jobs"), 503, "store_unavailable")
    problem(client.post("/v1/jobs", json=SPEC), 503, "store_unavailable")
    assert client.get("/healthz").status_code == 200
    postgres.rename(url, back=True)
    assert client.post("/v1/jobs", json=SPEC).status_code == 201


def test_yaml_and_json_are_read(world: World) -> None:
    for body, kind in ((json.dumps(SPEC), "application/json"), (yaml.safe_dump(SPEC), "application/yaml")):
        answer = world.client.post("/v1/jobs", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 201
        assert answer.json()["spec"]["training"]["seed"] == 0  # with its defaults


def test_a_wrong_spec_is_refused_with_all_pointers(world: World) -> None:
    wrong = SPEC | {"naem": "x", "training": {"steps": 0, "global_batch": 3}, "optimizer": {"muon": {"lr": -1}}}
    found = problem(world.client.post("/v1/jobs", json=wrong), 422, "spec_invalid")
    pointers = {error["pointer"] for error in found["errors"]}
    assert pointers == {"/naem", "/training/steps", "/optimizer/muon/lr"}
    assert "name" in next(e["suggestion"] for e in found["errors"] if e["pointer"] == "/naem")
    assert found["instance"] == "/v1/jobs"


def test_requests_that_are_wrong_are_problems_too(world: World) -> None:
    found = problem(world.client.get("/v1/jobs?page_size=0&state=NO"), 422, "invalid_input")
    assert {error["pointer"] for error in found["errors"]} == {"/query/page_size", "/query/state"}
    problem(world.client.get("/v1/jobs?label=x"), 422, "invalid_input")
    problem(world.client.get("/v1/jobs/none"), 404, "not_found")
    problem(world.client.get("/nothing"), 404, "not_found")
    wrong_method = world.client.delete("/v1/jobs")
    problem(wrong_method, 405, "method_not_allowed")
    assert wrong_method.headers["allow"], "what may be done is said (RFC 9110, 15.5.6)"
    problem(world.client.post("/v1/jobs", content="x", headers={"Content-Type": "image/png"}), 415, "unsupported_type")
    problem(world.client.get("/v1/jobs?page_token=zzz"), 400, "invalid_page_token")
    problem(world.client.post("/v1/jobs", content=b"x" * (2 << 20)), 413, "too_large")
    pieces = (b"x" * 1000 for _ in range(2000))
    problem(world.client.post("/v1/jobs", content=pieces), 413, "too_large")
    pieces = (b"x" * 1000 for _ in range(2000))
    problem(
        world.client.put("/v1/quotas/x", content=pieces, headers={"Content-Type": "application/json"}), 413, "too_large"
    )


def test_numbers_that_the_store_cannot_hold(world: World) -> None:
    job_id = world.submit()
    for digits in ("9" * 19, "9" * 26, "9" * 5000):
        for path in ("events?after=", "metrics?after=", "metrics?attempt="):
            problem(world.client.get(f"/v1/jobs/{job_id}/{path}{digits}"), 422, "invalid_input")
        headers = {"Last-Event-ID": digits}
        problem(world.client.get(f"/v1/jobs/{job_id}/events", headers=headers), 422, "invalid_input")
    for text in ("[" * 20000, f"[{'9' * 26}, [null, null, null]]", "[-1, [null, null, null]]", f"[{'9' * 5000}, []]"):
        token = base64.urlsafe_b64encode(text.encode()).decode()
        problem(world.client.get("/v1/jobs", params={"page_token": token}), 400, "invalid_page_token")
    assert world.client.get(f"/v1/jobs/{job_id}/events?after={2**63 - 1}").status_code == 200


def test_text_that_is_no_unicode_is_refused_with_its_pointer(world: World) -> None:
    body = json.dumps(SPEC | {"labels": {"a": "\ud800"}})
    found = problem(world.client.post("/v1/jobs", content=body), 422, "spec_invalid")
    assert [error["pointer"] for error in found["errors"]] == ["/labels/a"]


def test_tokens_and_scopes(world: World) -> None:
    plain = TestClient(world.app)
    for path in ("/v1/jobs", "/v1/kernels", "/v1/jobs/x/events"):
        problem(plain.get(path), 401, "unauthorized")
        problem(plain.get(path, headers={"Authorization": "Bearer wrong"}), 401, "unauthorized")
    for path in ("/healthz", "/metrics", "/openapi.json"):
        assert plain.get(path).status_code == 200
    assert world.settings.token_file.stat().st_mode & 0o777 == 0o600


def test_a_token_without_a_scope_is_refused(world: World) -> None:
    world.settings.token_file.write_text("reader jobs:read\n")
    app = create_app(world.settings, world.launcher, world.planner, world.clock, reconcile=False)
    client = TestClient(app, headers={"Authorization": "Bearer reader"})
    assert client.get("/v1/jobs").status_code == 200
    found = problem(client.post("/v1/jobs", json=SPEC), 403, "forbidden")
    assert "jobs:write" in found["detail"]
    problem(client.put("/v1/kernels/quack/breaker", json={"action": "trip", "reason": "x"}), 403, "forbidden")


def test_validate_only_submits_nothing(world: World) -> None:
    answer = world.client.post("/v1/jobs?validate_only=true", json=SPEC)
    assert answer.json()["valid"] is True
    assert world.client.get("/v1/jobs").json()["jobs"] == []


def test_plans(world: World) -> None:
    answer = world.client.post("/v1/plans?chip=nvidia-h200", json=SPEC)
    assert answer.json()["plan_hash"] == "plan-1" and world.planner.chips == ["nvidia-h200"]
    world.planner.refuse = (FieldError(pointer="/routing", code="no_matrix", message="m", suggestion="s"),)
    found = problem(world.client.post("/v1/plans", json=SPEC, headers={"Idempotency-Key": "a"}), 422, "plan_refused")
    assert found["errors"] == [{"pointer": "/routing", "code": "no_matrix", "message": "m", "suggestion": "s"}]
    world.planner.refuse = ()
    first = world.client.post("/v1/plans", json=SPEC, headers={"Idempotency-Key": "a"})  # a failure frees its key
    again = world.client.post("/v1/plans", json=SPEC, headers={"Idempotency-Key": "a"})
    assert first.status_code == again.status_code == 200
    assert again.headers["Idempotent-Replayed"] == "true" and again.json() == first.json()


def test_a_key_whose_plan_is_still_made(world: World) -> None:
    answers = []

    def ask_again() -> None:
        world.planner.before = lambda: None
        answers.append(world.client.post("/v1/plans", json=SPEC, headers={"Idempotency-Key": "a"}))

    world.planner.before = ask_again
    assert world.client.post("/v1/plans", json=SPEC, headers={"Idempotency-Key": "a"}).status_code == 200
    problem(answers[0], 409, "idempotency_running")


def test_case_22_the_same_submission_many_times(world: World) -> None:
    headers = {"Idempotency-Key": "key"}
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: world.client.post("/v1/jobs", json=SPEC, headers=headers), range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("Idempotent-Replayed" not in answer.headers for answer in answers) == 1
    assert len({answer.text for answer in answers}) == 1
    assert len(world.client.get("/v1/jobs").json()["jobs"]) == 1
    other = world.client.post("/v1/jobs", json=SPEC | {"name": "other"}, headers=headers)
    problem(other, 422, "idempotency_mismatch")


def test_case_7_submissions_from_many_threads(world: World) -> None:
    with ThreadPoolExecutor(25) as pool:
        codes = list(pool.map(lambda _: world.client.post("/v1/jobs", json=SPEC).status_code, range(50)))
    assert codes == [201] * 50


def test_pages_and_filters(world: World) -> None:
    ids = [world.submit(project="a" if n % 2 else "b", labels={"n": str(n)}) for n in range(5)]
    found, token = [], None
    for _ in range(3):
        page = world.client.get("/v1/jobs", params={"page_size": 2} | ({"page_token": token} if token else {})).json()
        found += [job["id"] for job in page["jobs"]]
        token = page["next_page_token"]
        world.submit()  # what comes in meanwhile moves nothing
    assert found == ids[::-1] and token is None
    page = world.client.get("/v1/jobs?project=a&page_size=1").json()
    assert page["jobs"][0]["id"] == ids[3]
    answer = world.client.get("/v1/jobs", params={"page_token": page["next_page_token"], "page_size": 1})
    problem(answer, 400, "invalid_page_token")  # of another list
    assert [job["id"] for job in world.client.get("/v1/jobs?label=n%3D2").json()["jobs"]] == [ids[2]]
    assert len(world.client.get("/v1/jobs?state=SUBMITTED&project=b").json()["jobs"]) == 3


def parse(text: str) -> list[dict[str, str]]:
    blocks = [block for block in text.replace("\r\n", "\n").split("\n\n") if block.strip()]
    return [dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":")) for block in blocks]


def test_events_as_a_stream_and_from_where_a_client_left(world: World) -> None:
    job_id = world.running()
    world.attempt(job_id).end(Reason.COMPLETED, "done")
    world.turn()
    headers = {"Accept": "text/event-stream"}
    answer = world.client.get(f"/v1/jobs/{job_id}/events", headers=headers)
    found = parse(answer.text)
    assert [int(event["id"]) for event in found[:-1]] == list(range(1, len(found)))
    assert found[-1]["event"] == "end" and json.loads(found[-1]["data"])["state"] == "SUCCEEDED"
    resumed = parse(world.client.get(f"/v1/jobs/{job_id}/events", headers=headers | {"Last-Event-ID": "4"}).text)
    assert resumed == found[4:]
    page = world.client.get(f"/v1/jobs/{job_id}/events?after=4&limit=2").json()
    assert [event["seq"] for event in page["events"]] == [5, 6] and page["next_after"] == 6
    problem(
        world.client.get(f"/v1/jobs/{job_id}/events", headers=headers | {"Last-Event-ID": "x"}), 422, "invalid_input"
    )
    problem(world.client.get("/v1/jobs/none/events", headers=headers), 404, "not_found")


def test_step_series(world: World) -> None:
    job_id = world.running()
    world.attempt(job_id).steps(1, 2, 3)
    world.attempt(job_id).push(make_report(0, 4, loss=float("nan")))
    world.turn()
    page = world.client.get(f"/v1/jobs/{job_id}/metrics?limit=2").json()
    assert [point["step"] for point in page["points"]] == [1, 2]
    assert page["points"][1]["tokens"] == 64
    forward = next(part for part in page["points"][1]["comm"] if part["phase"] == "forward")
    assert (forward["payload_bytes"], forward["collectives"]) == (4000, 4)
    page = world.client.get(f"/v1/jobs/{job_id}/metrics?after={page['next_after']}").json()
    assert [(point["step"], point["loss"], point["ranks"]) for point in page["points"]] == [(3, 2.0, 2), (4, "NaN", 1)]
    problem(world.client.get(f"/v1/jobs/{job_id}/metrics?attempt=9"), 404, "not_found")


def test_routes(world: World) -> None:
    job_id = world.submit()
    problem(world.client.get(f"/v1/jobs/{job_id}/routes"), 409, "conflict")
    job_id = world.running()
    world.attempt(job_id).steps(1, 2)
    world.turn()
    found = world.client.get(f"/v1/jobs/{job_id}/routes").json()
    assert [entry["name"] for entry in found["parameters"]] == ["w", "b"]
    muon = found["routes"][0]
    assert muon["overlap_ratio"] == pytest.approx(1 - 0.005 / 0.03)
    assert all(part["payload_bytes"] == part["planned_bytes"] for part in muon["comm"])
    assert [rank["measured_share"] for rank in found["ranks"]] == pytest.approx([1 / 3, 2 / 3])
    assert found["ns_matrices"] == found["planned_ns_matrices"] == 6
    assert found["ns"][0]["kernel"] == "cublas" and found["ns"][0]["launches"] == 60
    assert found["verification"]["status"] == "True"


def test_breakers(world: World) -> None:
    kernels = {entry["kernel"]: entry for entry in world.client.get("/v1/kernels").json()["kernels"]}
    assert kernels["cublas"]["breaker"] is None and kernels["cublas"]["available"] is True
    assert kernels["quack"]["breaker"] == "closed"
    path = "/v1/kernels/quack/breaker"
    tag = world.client.get(path).headers["etag"]
    trip = {"action": "trip", "reason": "slow"}
    answer = world.client.put(path, json=trip, headers={"If-Match": tag})
    assert (answer.json()["state"], answer.json()["epoch"]) == ("forced_open", 1)
    assert answer.headers["etag"] != tag
    problem(world.client.put(path, json=trip, headers={"If-Match": tag}), 412, "precondition_failed")
    assert world.client.put(path, json={"action": "reset", "reason": "ok"}).json()["state"] == "closed"


def test_kernels_without_a_breaker(world: World) -> None:
    trip = {"action": "trip", "reason": "x"}
    found = problem(world.client.put("/v1/kernels/cublas/breaker", json=trip), 409, "breaker_absent")
    assert "quack" in found["detail"]
    problem(world.client.get("/v1/kernels/auto/breaker"), 409, "breaker_absent")
    problem(world.client.get("/v1/kernels/none/breaker"), 404, "not_found")
    problem(world.client.put("/v1/kernels/quack/breaker", json=trip | {"scope": "none"}), 404, "not_found")
    found = problem(world.client.put("/v1/kernels/quack/breaker", json={"action": "explode"}), 422, "invalid_input")
    assert {error["pointer"] for error in found["errors"]} == {"/body/action", "/body/reason"}


def test_openapi_has_examples(world: World) -> None:
    document = world.client.get("/openapi.json").json()
    body = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    for kind in ("application/json", "application/yaml"):
        example = body[kind]["examples"]["tiny"]["value"]
        assert world.client.post("/v1/jobs?validate_only=true", json=example).status_code == 200
    assert {"/v1/plans", "/v1/jobs/{job_id}:cancel", "/v1/kernels/{kernel}/breaker"} <= document["paths"].keys()
