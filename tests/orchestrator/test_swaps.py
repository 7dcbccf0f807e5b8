"""Kernel swaps and breakers as the control plane sees them: every word kept with who, when and why, one at a time."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config

from orchestrator.store import database as database_module
from orchestrator.store.database import Database
from orchestrator.store.kernels import breaker_rows
from tests.orchestrator.conftest import World
from tests.orchestrator.test_exporter import scrape, value
from worker.contract.kernels import Algorithm, CoefficientSet, Kernel, KernelTarget
from worker.contract.messages import Milestone
from worker.contract.states import Reason

WANTED = {"kernel": "blocked", "algorithm": "direct", "reason": "a better one arrived"}


def ask(world: World, job: str, code: int = 202, **changes: object) -> dict[str, Any]:
    answer = world.client.post(f"/v1/jobs/{job}/kernel-swaps", json=WANTED | changes)
    assert answer.status_code == code, answer.text
    found: dict[str, Any] = answer.json()
    return found


def look(world: World, job: str, swap: str) -> dict[str, Any]:
    found: dict[str, Any] = world.client.get(f"/v1/jobs/{job}/kernel-swaps/{swap}").json()
    return found


def tell(world: World, job: str, name: str, message: str = "", attempt: int = 1, **data: object) -> None:
    body = {"name": name, "at": 5.0, "message": message or name, "rank": 0, "data": data}
    world.attempt(job, attempt).push(Milestone.model_validate(body))
    world.turn()


def events(world: World, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.client.get(f"/v1/jobs/{job}/events").json()["events"]
    return found


def test_a_swap_from_the_request_to_the_proof(world: World) -> None:
    job = world.running()
    asked = ask(world, job)
    assert (asked["state"], asked["reason"]) == ("requested", WANTED["reason"])
    assert asked["actor"].startswith("token-"), "the name of the token, never the token"
    world.turn()
    order = world.attempt(job).policies[-1].swap
    assert order is not None and order.target == KernelTarget(kernel=Kernel.BLOCKED, algorithm=Algorithm.DIRECT)
    assert (order.number, order.deadline_s) == (asked["number"], 120.0)
    for name, state in (
        ("swap_preparing", "preparing"),
        ("swap_prepared", "prepared"),
        ("swap_committed", "committed"),
    ):
        tell(world, job, name, swap=order.number, step=7, epoch=3)
        assert look(world, job, asked["id"])["state"] == state
    found = look(world, job, asked["id"])
    assert (found["step"], found["epoch"], found["message"]) == (7, 3, "swap_committed")
    requested = next(event for event in events(world, job) if event["kind"] == "swap_requested")
    assert requested["data"]["actor"] == asked["actor"] and requested["data"]["reason"] == WANTED["reason"]
    assert len(world.attempt(job).policies) == 1, "told once"
    assert value(scrape(world), "dmuon_kernel_swaps_total", result="committed") == 1


def test_a_swap_that_is_rolled_back_says_which_rank_refused_and_why(world: World) -> None:
    job = world.running()
    asked = ask(world, job)
    world.turn()
    tell(world, job, "swap_refused", "rank 1 refuses the swap: no such GPU", swap=asked["number"])
    tell(world, job, "swap_rolled_back", "rank 1 refused", swap=asked["number"], step=4)
    found = look(world, job, asked["id"])
    assert found["state"] == "rolled_back"
    assert found["message"] == "rank 1 refuses the swap: no such GPU; rank 1 refused"
    tell(world, job, "swap_committed", swap=asked["number"])
    assert look(world, job, asked["id"])["state"] == "rolled_back", "an end is an end"
    assert value(scrape(world), "dmuon_kernel_swaps_total", result="rolled_back") == 1
    ask(world, job, kernel="cublas")
    world.turn()
    assert world.attempt(job).policies[-1].target is None, "no later attempt starts with what was taken back"


def test_one_swap_at_a_time_and_only_while_the_job_trains(world: World) -> None:
    waiting = world.submit()
    assert ask(world, waiting, 409)["code"] == "swap_impossible"
    world.client.post(f"/v1/jobs/{waiting}:cancel")
    assert ask(world, waiting, 409)["code"] == "job_finished"
    job = world.running()
    first = ask(world, job)
    assert first["id"] in ask(world, job, 409)["detail"]
    assert ask(world, "none", 404)["code"] == "not_found"
    (wrong,) = ask(world, job, 422, kernel="fast")["errors"]
    assert wrong["pointer"] == "/body/kernel" and wrong["message"].endswith(", found 'fast'")
    assert ask(world, job, 422, reason="  ")["errors"][0]["pointer"] == "/body/reason", "blanks say no why"
    empty = world.client.post(f"/v1/jobs/{job}/kernel-swaps", json={"reason": "x"})
    assert empty.status_code == 422 and "at least one of kernel" in empty.text
    assert world.client.get(f"/v1/jobs/{job}/kernel-swaps/none").status_code == 404
    assert [entry["id"] for entry in world.client.get(f"/v1/jobs/{job}/kernel-swaps").json()["swaps"]] == [first["id"]]


def test_a_word_on_the_kernels_of_a_baseline_is_refused_and_leaves_nothing_behind(world: World) -> None:
    job, other = world.running(optimizer={"kind": "adamw"}), world.running()
    refused = ask(world, job, 409)
    assert refused["code"] == "kernels_absent" and "torch's own adamw" in refused["detail"]
    for action in ("trip", "reset", "observe"):
        body = {"action": action, "reason": "slow", "scope": job}
        answer = world.client.put("/v1/kernels/quack/breaker", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "kernels_absent")
    breaker = world.client.get("/v1/kernels/quack/breaker").json()
    assert breaker["epoch"] == 0 and not breaker["jobs"] and not breaker["history"]
    assert world.client.put("/v1/kernels/quack/breaker", json={"action": "trip", "reason": "slow"}).status_code == 200
    assert "breaker" not in {event["kind"] for event in events(world, job)}, "it does not concern that job"
    assert "breaker" in {event["kind"] for event in events(world, other)}


def test_a_swap_can_be_tied_to_what_was_seen_and_is_not_done_twice(world: World) -> None:
    job = world.running()
    world.client.put("/v1/kernels/quack/breaker", json={"action": "trip", "reason": "x"})
    assert ask(world, job, 412, expected_epoch=0)["code"] == "precondition_failed"
    assert "forced open" in ask(world, job, 409, kernel="quack")["detail"]
    path, headers = f"/v1/jobs/{job}/kernel-swaps", {"Idempotency-Key": "k"}
    body = WANTED | {"expected_epoch": 1}
    one, two = (world.client.post(path, json=body, headers=headers) for _ in range(2))
    assert one.json() == two.json() and two.headers["Idempotent-Replayed"] == "true"
    assert one.json()["number"] == 2, "breakers and swaps are counted in one order"


def test_words_on_kernels_are_on_record(world: World) -> None:
    job = world.running()
    swap = ask(world, job)
    ask(world, job, 409)
    world.client.put("/v1/kernels/quack/breaker", json={"action": "trip", "reason": "slow", "scope": job})
    entries = [entry for entry in world.client.get("/v1/audit").json()["entries"] if "kernel" in entry["action"]]
    assert [(entry["action"], entry["outcome"]) for entry in entries] == [
        ("PUT /v1/kernels/quack/breaker", "200"),
        (f"POST /v1/jobs/{job}/kernel-swaps", "swap_impossible"),
        (f"POST /v1/jobs/{job}/kernel-swaps", "202"),
    ]
    assert {(entry["actor"], entry["at"]) for entry in entries} == {(swap["actor"], world.clock.now)}


def test_refused_words_on_a_breaker_are_on_record(world: World) -> None:
    """A state that it is not in any more, a kernel that has no breaker or is none, a job that is none, no such word."""
    path, trip = "/v1/kernels/{}/breaker", {"action": "trip", "reason": "slow"}
    put = world.client.put
    answers = [
        put(path.format("quack"), json=trip, headers={"If-Match": '"7"'}),
        put(path.format("cublas"), json=trip),
        put(path.format("fast"), json=trip),
        put(path.format("quack"), json=trip | {"scope": "nobody"}),
        put(path.format("quack"), json=trip | {"action": "explode"}),
        put(path.format("quack"), json={"action": "trip"}),
    ]
    codes = [(answer.status_code, answer.json()["code"]) for answer in answers]
    assert [status for status, _ in codes] == [412, 409, 404, 404, 422, 422], codes
    entries = world.client.get("/v1/audit").json()["entries"][::-1]
    assert [entry["outcome"] for entry in entries] == [code for _, code in codes]
    asked = [entry["action"].removeprefix("PUT /v1/kernels/").removesuffix("/breaker") for entry in entries]
    assert asked == ["quack", "cublas", "fast", "quack", "quack", "quack"]
    assert [entry["target"] for entry in entries] == ["quack", "cublas", "", "quack", "", ""]
    assert all(entry["actor"].startswith("token-") for entry in entries)
    breaker = world.client.get(path.format("quack")).json()
    assert breaker["epoch"] == 0 and not breaker["history"], "and nothing else came of them"


def test_only_operators_swap(world: World) -> None:
    job = world.running()
    nobody = world.client.post(f"/v1/jobs/{job}/kernel-swaps", json=WANTED, headers={"Authorization": "Bearer no"})
    assert nobody.status_code == 401


def test_an_attempt_that_ends_fails_its_swap_and_a_committed_one_holds_for_the_next(world: World) -> None:
    job = world.running()
    done = ask(world, job)
    world.turn()
    tell(world, job, "swap_committed", swap=done["number"], step=7, epoch=3)
    open_one = ask(world, job, kernel="cublas", algorithm=None, coefficients="you")
    world.turn()
    order = world.attempt(job).policies[-1]
    assert order.target == KernelTarget(kernel=Kernel.BLOCKED, algorithm=Algorithm.DIRECT)
    assert order.swap is not None and order.swap.target.coefficients is CoefficientSet.YOU
    tell(world, job, "swap_prepared", swap=open_one["number"], step=9, epoch=4)  # it ran, and nobody has proved it
    world.attempt(job).end(Reason.WORKER_LOST, "the process of rank 1 is gone")
    world.turn(2)
    found = look(world, job, open_one["id"])
    assert found["state"] == "failed" and "prepared when the attempt ended" in found["message"]
    assert "rank 1 is gone" in found["message"]
    assert "swap_failed" in [event["kind"] for event in events(world, job)]
    world.clock.advance(3600)
    world.turn(2)
    policy = world.attempt(job, 2).start.kernels
    assert (policy.target, policy.swap) == (order.target, None), "what was proved, and nothing else"


def test_a_supervisor_that_is_gone_fails_the_swap_too(world: World) -> None:
    job = world.running()
    asked = ask(world, job)
    world.attempt(job).dead = True
    world.turn(3)
    assert look(world, job, asked["id"])["state"] == "failed"


def test_a_breaker_that_trips_by_itself_is_stored_shown_and_exported(world: World) -> None:
    job = world.running()
    where = {"kernel": "blocked", "size_class": 64, "dtype": "float32", "step": 9, "epoch": 1}
    tell(world, job, "breaker_changed", **where, **{"from": "closed", "to": "open"}, reason="exception on rank 1")
    found = world.client.get("/v1/kernels/blocked/breaker").json()
    assert found["state"] == "closed", "the operator has said nothing"
    assert [(b["job"], b["state"], b["reason"]) for b in found["runtime"]] == [(job, "open", "exception on rank 1")]
    exported = scrape(world)
    assert value(exported, "dmuon_breaker_state", job=job, kernel="blocked", state="open") == 1
    moved = {"kernel": "blocked", "from_state": "closed", "to_state": "open"}
    assert value(exported, "dmuon_breaker_transitions_total", **moved) == 1
    tell(world, job, "breaker_changed", **where, **{"from": "open", "to": "closed"}, reason="good")
    assert world.client.get("/v1/kernels/blocked/breaker").json()["runtime"] == []
    assert value(scrape(world), "dmuon_breaker_state", job=job, kernel="blocked", state="closed") == 1


@pytest.mark.parametrize(
    ("action", "state", "field"),
    [
        ("force", "forced_open", "tripped"),
        ("disable", "disabled", "disabled"),
        ("observe", "metrics_only", "metrics_only"),
    ],
)
def test_a_word_expires_with_its_reason(world: World, action: str, state: str, field: str) -> None:
    job = world.running()
    change = {"action": action, "reason": "for an hour", "expires_in_s": 3600}
    found = world.client.put("/v1/kernels/blocked/breaker", json=change).json()
    assert (found["state"], found["expires_at"]) == (state, world.clock.now + 3600)
    world.turn()
    assert getattr(world.attempt(job).policies[-1], field) == {Kernel.BLOCKED}
    (told,) = [event for event in events(world, job) if event["kind"] == "breaker"]
    said = {"actor": found["actor"], "reason": "for an hour", "from": "closed", "to": state}
    assert told["data"] == told["data"] | said and told["at"] == world.clock.now
    text = f"{found['actor']} set the breaker of blocked from closed to {state}: for an hour"
    assert told["message"] == text, "who, why and when"
    world.clock.advance(3599)
    world.turn()
    assert world.client.get("/v1/kernels/blocked/breaker").json()["state"] == state
    world.clock.advance(2)
    world.turn(2)
    after = world.client.get("/v1/kernels/blocked/breaker").json()
    assert (after["state"], after["expires_at"]) == ("closed", None)
    words = [(word["to_state"], word["actor"]) for word in after["history"]]
    assert words == [("closed", "expiry"), (state, found["actor"])] and found["actor"].startswith("token-")
    assert "for an hour" in after["history"][0]["reason"]
    policy = world.attempt(job).policies[-1]
    assert getattr(policy, field) == frozenset() and policy.resets == {Kernel.BLOCKED: after["epoch"]}


def test_a_kernel_that_cannot_trip_is_not_forgotten(world: World) -> None:
    refused = world.client.put("/v1/kernels/blocked/breaker", json={"action": "disable", "reason": "x"})
    assert refused.status_code == 422 and "expires_in_s" in refused.text


def test_the_second_migration_keeps_what_the_first_stored(tmp_path: Path) -> None:
    """A store of the first version, with a word in it, opens in the new one."""
    file = tmp_path / "old.db"
    config = Config()
    config.set_main_option("script_location", str(Path(database_module.__file__).parent / "migrations"))
    database = Database(f"sqlite:///{file}")
    with database._writer.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.commit()
    with sqlite3.connect(file) as plain:
        plain.execute("insert into breakers values ('quack', 'all', 'forced_open', 'slow', 'local', 1.0, 4)")
    plain.close()
    database.migrate()
    with database.read() as session:
        (row,) = breaker_rows(session)
        assert (row.kernel, row.state, row.epoch, row.expires_at) == ("quack", "forced_open", 4, None)
    database.close()
