"""Whole lives of jobs on a cluster that the test drives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import LauncherUnavailable, PlannerFailed, StartFailed, SupervisorGone
from orchestrator.launcher_api import Resources
from orchestrator.reconcile.decide import FORCE_AFTER_S
from orchestrator.reconcile.loop import Reconciler
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import FORWARD, MATRICES, REDUCE, make_report
from worker.contract.errors import FieldError
from worker.contract.kernels import Kernel
from worker.contract.messages import Milestone
from worker.contract.spec import JobSpec
from worker.contract.states import Reason


def condition(world: World, job_id: str, kind: str) -> dict[str, Any]:
    conditions: Any = world.job(job_id)["conditions"]
    return next((entry for entry in conditions if entry["type"] == kind), {})


def events(world: World, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.client.get(f"/v1/jobs/{job_id}/events?limit=1000").json()["events"]
    return found


def test_life_of_a_job_that_succeeds(world: World) -> None:
    job_id = world.running()
    attempt = world.attempt(job_id)
    attempt.steps(1, 2, 3)
    world.turn()
    progress: Any = world.job(job_id)["progress"]
    assert (progress["step"], progress["loss"], progress["tokens"]) == (3, 2.0, 96)
    assert progress["overlap_ratio"] == pytest.approx(1 - 0.005 / 0.03)
    attempt.steps(4, 5)
    attempt.end(Reason.COMPLETED, "all steps done")
    world.turn()
    job = world.job(job_id)
    assert (job["state"], job["reason"], job["blame"]) == ("SUCCEEDED", "completed", "nobody")
    assert attempt.left
    moves = [(e["data"]["from"], e["data"]["to"]) for e in events(world, job_id) if e["kind"] == "state"]
    assert moves == [
        ("SUBMITTED", "QUEUED"), ("QUEUED", "STARTING"), ("STARTING", "RUNNING"), ("RUNNING", "STOPPING"),
        ("STOPPING", "SUCCEEDED"),
    ]  # fmt: skip
    assert [e["seq"] for e in events(world, job_id)] == list(range(1, len(events(world, job_id)) + 1))


def test_a_plan_that_is_refused_fails_the_job_with_all_errors(world: World) -> None:
    world.planner.refuse = tuple(FieldError(pointer=f"/routing/{n}", code="no_matrix", message="m") for n in "ab")
    job_id = world.submit()
    world.turn()
    job: Any = world.job(job_id)
    assert (job["state"], job["reason"], job["blame"]) == ("FAILED", "plan_refused", "user")
    assert [error["pointer"] for error in job["errors"]] == ["/routing/a", "/routing/b"]


def test_a_planner_that_fails_is_tried_again_with_pauses_and_then_given_up(world: World) -> None:
    tries = []

    def fail() -> None:
        tries.append(world.clock.now)
        raise PlannerFailed("it died")

    world.planner.before = fail
    job_id = world.submit()
    for _ in range(100):
        world.turn()
        world.clock.advance(1)
    assert [at - tries[0] for at in tries] == [0, 5, 15]
    job: Any = world.job(job_id)
    assert (job["state"], job["reason"], job["blame"]) == ("FAILED", "internal", "platform")
    assert "it died" in job["message"]


def test_a_plan_with_another_hash_than_expected_is_refused(world: World) -> None:
    from tests.orchestrator.fakes import make_spec

    body = make_spec().model_dump_json()
    job_id = world.client.post("/v1/jobs?expected_plan_hash=other", content=body).json()["id"]
    same = world.client.post("/v1/jobs", content=body, headers={"Expected-Plan-Hash": "plan-1"}).json()["id"]
    world.turn()
    job: Any = world.job(job_id)
    assert job["reason"] == "plan_refused" and job["errors"][0]["code"] == "plan_mismatch"
    assert world.state(same) == "STARTING"


def test_each_job_is_given_a_place_for_its_checkpoints(world: World) -> None:
    first, second = world.running(), world.running()
    places = [world.attempt(job).start.checkpoint_directory for job in (first, second)]
    assert places == [str(world.settings.state_dir / "checkpoints" / job) for job in (first, second)]


def test_case_17_impossible_fails_and_busy_waits(world: World) -> None:
    world.launcher.total = Resources(cpus=2)
    impossible = world.submit(mesh={"shard": 1}, resources={"cpus_per_worker": 64})
    wide = world.submit(mesh={"shard": 4})
    first = world.submit()
    second = world.submit()
    world.turn()
    job: Any = world.job(impossible)
    assert (job["state"], job["reason"]) == ("FAILED", "infeasible")
    assert job["errors"][0]["pointer"] == "/resources"
    assert "64 CPUs" in job["message"] and "2 CPUs" in job["message"]
    job = world.job(wide)
    assert job["reason"] == "infeasible" and job["errors"][0]["pointer"] == "/mesh"
    assert world.state(first) == "STARTING"
    assert world.state(second) == "QUEUED"
    assert condition(world, second, "Admitted")["reason"] == "waiting_for_capacity"
    assert "2 CPUs" in condition(world, second, "Admitted")["message"]
    assert list(world.launcher.attempts) == [(first, 1)]


def test_a_job_that_started_holds_its_resources_before_the_cluster_shows_it(world: World) -> None:
    world.launcher.total = Resources(cpus=2)
    first = world.submit()
    world.turn()
    second = world.submit()
    world.turn(3)  # the cluster still says that everything is free
    assert (world.state(first), world.state(second)) == ("STARTING", "QUEUED")


def test_case_18_cancelled_while_it_waits_never_starts(world: World) -> None:
    world.launcher.total = Resources(cpus=2)
    first = world.running()
    world.launcher.free = Resources()
    second = world.submit()
    world.turn()
    answer = world.client.post(f"/v1/jobs/{second}:cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "CANCELLED")
    again = world.client.post(f"/v1/jobs/{second}:cancel")
    assert (again.status_code, again.json()) == (200, answer.json())
    world.attempt(first).end(Reason.COMPLETED)
    world.launcher.free = None
    world.turn(3)
    assert list(world.launcher.attempts) == [(first, 1)]
    refused = world.client.post(f"/v1/jobs/{first}:cancel")
    assert (refused.status_code, refused.json()["code"]) == (409, "job_finished")


def test_cancel_of_a_running_job_stops_it_and_waits_for_its_end(world: World) -> None:
    job_id = world.running()
    assert world.client.post(f"/v1/jobs/{job_id}:cancel").json()["state"] == "STOPPING"
    world.turn(3)
    attempt = world.attempt(job_id)
    assert [request.reason for request in attempt.stops] == [Reason.CANCELLED]  # not asked again at once
    assert world.state(job_id) == "STOPPING"
    world.clock.advance(6)
    world.turn()
    assert len(attempt.stops) == 2
    attempt.end(Reason.CANCELLED)
    world.turn()
    assert world.state(job_id) == "CANCELLED"


def test_a_job_that_finished_while_it_was_cancelled_has_succeeded(world: World) -> None:
    job_id = world.running()
    world.attempt(job_id).end(Reason.COMPLETED)
    world.client.post(f"/v1/jobs/{job_id}:cancel")
    world.turn()
    assert world.state(job_id) == "SUCCEEDED"


def test_cancel_before_the_supervisor_exists_starts_nothing(world: World) -> None:
    world.launcher.total = Resources(cpus=2)
    job_id = world.submit()
    world.launcher.start_error = LauncherUnavailable("slow")
    world.turn()
    assert world.state(job_id) == "STARTING"
    world.client.post(f"/v1/jobs/{job_id}:cancel")
    world.launcher.start_error = None
    world.turn()
    assert world.state(job_id) == "CANCELLED"
    assert not world.launcher.attempts


def test_errors_of_ranks_are_grouped(world: World) -> None:
    job_id = world.running()
    attempt = world.attempt(job_id)
    attempt.fail(0, ValueError("same"))
    attempt.fail(1, ValueError("same"))
    attempt.fail(2, KeyError("other"))
    attempt.end(Reason.USER_ERROR, "rank 0: ValueError: same")
    world.turn()
    job: Any = world.job(job_id)
    assert (job["state"], job["reason"], job["blame"]) == ("FAILED", "user_error", "user")
    assert [(group["type"], group["ranks"]) for group in job["rank_errors"]] == [
        ("builtins.ValueError", [0, 1]),
        ("builtins.KeyError", [2]),
    ]


def test_a_dead_supervisor_fails_the_job_only_after_what_it_left_is_gone(world: World) -> None:
    job_id = world.running()
    world.attempt(job_id).dead = True
    world.launcher.leftovers = ("placement group x",)
    world.turn(3)
    assert world.state(job_id) == "STOPPING"
    world.launcher.leftovers = ()
    world.turn()
    job = world.job(job_id)
    assert (job["state"], job["reason"]) == ("RESTARTING", None)
    assert job["attempts"][0]["end_reason"] == "worker_lost"


def saved(world: World, job_id: str, path: Path) -> None:
    """Let a job tell of a checkpoint that lies at ``path``."""
    note = {"name": "checkpoint_saved", "at": 5.0, "message": "saved", "data": {"path": str(path), "step": 7}}
    world.attempt(job_id).push(Milestone.model_validate(note))
    world.turn()


def test_a_pause_ends_a_silent_supervisor_by_force_only_where_a_checkpoint_is_left(
    world: World, tmp_path: Path
) -> None:
    """One without goes on and says what can be done; so does one whose checkpoint somebody has removed."""
    able, removed, never = world.running(), world.running(), world.running()
    for folder in ("able/step-00000009", "removed"):
        (tmp_path / folder).mkdir(parents=True)
    saved(world, able, tmp_path / "able" / "step-00000007")  # a later one, untold, has taken its place
    saved(world, removed, tmp_path / "removed" / "step-00000007")
    jobs = (able, removed, never)
    for job_id in jobs:
        world.attempt(job_id).silent = True
        world.client.post(f"/v1/jobs/{job_id}:pause")
    world.turn()
    world.clock.advance(attempt_patience_s(world, able) + FORCE_AFTER_S - 1)
    world.turn()
    assert [world.attempt(job_id).dead for job_id in jobs] == [False] * 3, "their patience is not over"
    assert condition(world, able, "Reachable")["reason"] == "launcher_unavailable"
    world.clock.advance(2)
    world.turn(3)
    assert [world.state(job_id) for job_id in jobs] == ["PAUSED", "STOPPING", "STOPPING"]
    assert [world.attempt(job_id).dead for job_id in jobs] == [True, False, False]
    forced = [event["message"] for event in events(world, able) if event["kind"] == "ended_by_force"]
    assert len(forced) == 1 and "(paused)" in forced[0] and "newest checkpoint" in forced[0]
    for job_id in (removed, never):
        told = condition(world, job_id, "Reachable")
        assert (told["status"], told["reason"]) == ("Unknown", "nothing_saved")
        assert f"'dmuonctl cancel {job_id}' ends it at once" in told["message"]
        assert "ended_by_force" not in {event["kind"] for event in events(world, job_id)}
    explained = world.client.get(f"/v1/jobs/{never}:explain").json()
    assert "nothing_saved" in {cause["code"] for cause in explained["causes"]}
    world.client.post(f"/v1/jobs/{able}:resume")
    world.client.post(f"/v1/jobs/{never}:cancel")
    world.attempt(removed).silent = False
    world.turn(3)
    assert (world.state(able), world.state(never)) == ("STARTING", "CANCELLED")
    assert world.attempt(removed).stops[0].reason is Reason.PAUSED, "it is asked once it can be, and saves"
    assert condition(world, removed, "Reachable")["status"] == "True"


def test_a_supervisor_that_does_not_answer_is_not_ended_by_force_while_its_job_is_to_run(world: World) -> None:
    job_id = world.running()
    attempt = world.attempt(job_id)
    attempt.silent = True
    world.turn()
    world.clock.advance(10_000)
    world.turn(3)
    assert world.state(job_id) == "RUNNING" and not attempt.dead, "nobody knows whether it is well"
    assert world.client.post(f"/v1/jobs/{job_id}:cancel").json()["state"] == "STOPPING"
    world.clock.advance(attempt_patience_s(world, job_id) + FORCE_AFTER_S - 1)
    world.turn()
    assert not attempt.dead, "its patience is not over"
    world.clock.advance(2)
    world.launcher.unreachable = True
    world.turn()
    assert world.state(job_id) == "STOPPING" and not attempt.dead
    world.launcher.unreachable = False
    world.turn(2)
    assert attempt.dead and world.state(job_id) == "CANCELLED"
    assert [event["kind"] for event in events(world, job_id)].count("ended_by_force") == 1


def test_a_start_that_was_too_slow_ends_by_force_too(world: World) -> None:
    job_id = world.submit(failure={"start_deadline_s": 30})
    world.turn()
    world.clock.advance(31)
    world.turn()
    world.attempt(job_id).silent = True
    world.turn()
    assert world.state(job_id) == "STOPPING"
    world.clock.advance(attempt_patience_s(world, job_id) + FORCE_AFTER_S + 1)
    world.turn(3)
    job = world.job(job_id)
    assert (job["state"], job["reason"]) == ("FAILED", "setup_failed"), "nobody could have cancelled it any more"


def attempt_patience_s(world: World, job_id: str) -> float:
    return JobSpec.model_validate_json(world.attempt(job_id).start.spec_json).failure.stop_patience_s


def test_an_unreachable_cluster_changes_no_state(world: World) -> None:
    job_id = world.running()
    waiting = world.submit()
    world.turn()
    world.launcher.unreachable = True
    world.clock.advance(10_000)
    world.turn(3)
    assert world.state(job_id) == "RUNNING"
    assert condition(world, job_id, "Reachable")["status"] == "Unknown"
    world.launcher.unreachable = False
    world.turn()
    assert condition(world, job_id, "Reachable")["status"] == "True"
    assert world.state(waiting) in ("STARTING", "STOPPING", "FAILED")


def test_start_deadline(world: World) -> None:
    job_id = world.submit(failure={"start_deadline_s": 30})
    world.turn()
    world.clock.advance(31)
    world.turn()
    assert world.state(job_id) == "STOPPING"
    assert world.attempt(job_id).stops[0].reason is Reason.SETUP_FAILED
    world.attempt(job_id).end(Reason.SETUP_FAILED)
    world.turn()
    assert world.job(job_id)["reason"] == "setup_failed"


def test_case_50_an_entry_point_that_fails_ends_the_job_with_its_error(world: World) -> None:
    world.launcher.start_error = StartFailed("ModuleNotFoundError: no module named 'worker.actors'")
    job_id = world.submit()
    world.turn()
    job: Any = world.job(job_id)
    assert (job["state"], job["reason"]) == ("FAILED", "setup_failed")
    assert "ModuleNotFoundError" in job["message"]


def test_a_supervisor_that_dies_while_it_is_started_is_lost_and_not_the_users_fault(world: World) -> None:
    world.launcher.start_error = SupervisorGone("the process is dead")
    job_id = world.submit()
    world.turn(2)
    job: Any = world.job(job_id)
    assert (job["state"], job["attempts"][0]["end_reason"]) == ("RESTARTING", "worker_lost")
    world.launcher.start_error = None
    world.clock.advance(5)
    world.turn(2)
    assert world.state(job_id) == "STARTING"


def test_case_11_another_control_plane_goes_on_where_the_first_one_ended(world: World) -> None:
    job_id = world.running()
    attempt = world.attempt(job_id)
    attempt.steps(1, 2)
    world.turn()
    other = Reconciler(world.database, world.launcher, world.planner, world.clock)
    attempt.steps(3)
    other.run_once()
    progress: Any = world.job(job_id)["progress"]
    assert progress["step"] == 2  # the first one has the lease
    world.clock.advance(6)  # and is dead
    other.run_once()
    progress = world.job(job_id)["progress"]
    assert progress["step"] == 3
    points: Any = world.client.get(f"/v1/jobs/{job_id}/metrics").json()["points"]
    assert [(point["step"], point["ranks"]) for point in points] == [(1, 2), (2, 2), (3, 2)]


def test_a_supervisor_that_lives_and_never_answers_is_unknown_and_costs_nobody_anything(world: World) -> None:
    silent, other = world.running(), world.running()
    world.attempt(silent).steps(1)
    world.turn()
    world.attempt(silent).silent = True
    for _ in range(5):
        world.clock.advance(3600)
        world.attempt(other).steps(len(world.attempt(other).entries))
        world.turn()
    found = condition(world, silent, "Reachable")
    assert (found["status"], found["reason"]) == ("Unknown", "launcher_unavailable")
    assert "did not answer" in found["message"]
    job: Any = world.job(silent)
    assert (job["state"], job["progress"]["step"], len(job["attempts"])) == ("RUNNING", 1, 1)
    progress: Any = world.job(other)["progress"]
    assert progress["step"] > 1 and condition(world, other, "Reachable")["status"] == "True"
    world.attempt(silent).silent = False
    world.attempt(silent).steps(2)
    world.turn()
    job = world.job(silent)
    assert (job["state"], job["progress"]["step"], len(job["attempts"])) == ("RUNNING", 2, 1)
    assert condition(world, silent, "Reachable")["status"] == "True"


def test_reports_that_come_twice_count_once(world: World) -> None:
    job_id = world.running()
    attempt = world.attempt(job_id)
    attempt.steps(1)
    world.turn()
    attempt.steps(1, 2)  # the same step under other numbers
    world.turn(2)
    points: Any = world.client.get(f"/v1/jobs/{job_id}/metrics").json()["points"]
    assert [(point["step"], point["ranks"]) for point in points] == [(1, 2), (2, 2)]


def test_routes_are_verified_when_every_rank_has_reported(world: World) -> None:
    job_id = world.running()
    attempt = world.attempt(job_id)
    attempt.push(make_report(0, 1))
    world.turn()
    assert condition(world, job_id, "RoutesVerified") == {}
    attempt.push(make_report(1, 1), make_report(0, 2))
    world.turn()
    found = condition(world, job_id, "RoutesVerified")
    assert found["status"] == "True"
    assert found["data"] == {
        "attempt": 1, "step": 1, "skipped": 0, "matrices": MATRICES, "planned_matrices": MATRICES,
        "payload_bytes": 2 * (FORWARD + REDUCE), "planned_bytes": 2 * (FORWARD + REDUCE),
    }  # fmt: skip


def test_newton_schulz_that_did_not_run_is_an_alarm(world: World) -> None:
    job_id = world.running()
    world.attempt(job_id).push(make_report(0, 1, matrices=0), make_report(1, 1))
    world.turn()
    found = condition(world, job_id, "RoutesVerified")
    assert found["status"] == "False"
    assert f"0 matrices orthogonalised, {MATRICES} planned" in found["message"]
    assert [e["kind"] for e in events(world, job_id)].count("alarm") == 1
    world.turn(2)
    assert [e["kind"] for e in events(world, job_id)].count("alarm") == 1


def test_a_trip_reaches_running_jobs_and_those_to_come(world: World) -> None:
    world.launcher.total = Resources(cpus=4)
    running = world.running()
    change = {"action": "trip", "reason": "test"}
    assert world.client.put("/v1/kernels/quack/breaker", json=change).json()["state"] == "forced_open"
    later = world.submit()
    world.turn(2)
    policy = world.attempt(running).policies[-1]
    assert (policy.epoch, policy.tripped) == (1, {Kernel.QUACK})
    assert len(world.attempt(running).policies) == 1  # told once
    start = world.attempt(later).start.kernels
    assert (start.epoch, start.tripped) == (1, {Kernel.QUACK})
    assert world.attempt(later).policies == []
    assert "breaker" in [e["kind"] for e in events(world, running)]


def test_a_trip_for_one_job_leaves_the_others(world: World) -> None:
    one, other = world.running(), world.running()
    change = {"action": "trip", "reason": "test", "scope": one}
    world.client.put("/v1/kernels/blocked/breaker", json=change)
    world.turn()
    assert world.attempt(one).policies[-1].tripped == {Kernel.BLOCKED}
    assert world.attempt(other).policies == []
    world.client.put("/v1/kernels/blocked/breaker", json={"action": "reset", "reason": "fine"})
    world.turn()
    assert world.attempt(one).policies[-1].tripped == frozenset()
    assert world.attempt(one).policies[-1].epoch == 2
