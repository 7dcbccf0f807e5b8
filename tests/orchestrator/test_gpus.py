"""Whose the processes on GPUs are, from a node's answer to figures, HTTP and the command."""

from __future__ import annotations

import json
import threading

import pytest

from orchestrator.api.auth import Authenticator
from orchestrator.cli import app
from orchestrator.client import Client
from orchestrator.gpus import Standing, standing_of, why
from orchestrator.reconcile.loop import Reconciler
from tests.orchestrator.conftest import World
from tests.orchestrator.fakes import FakeClock, FakeLauncher, FakePlanner
from tests.orchestrator.test_api import problem
from tests.orchestrator.test_cli import client, run, runner  # noqa: F401  (client is a fixture)
from tests.orchestrator.test_exporter import scrape
from worker.contract.gpus import GpuLook, GpuProcess, attempt_mark
from worker.contract.states import Reason

NODE, OTHER = "10.0.0.5", "10.0.0.6"
NAMES = ("dmuon_gpu_stray_processes", "dmuon_gpu_unresolved_processes", "dmuon_gpu_node_seen")


@pytest.fixture
def database_kind() -> str:
    return "sqlite"  # nothing of it is stored


def holder(pid: int, gpu: int = 0, **fields: object) -> GpuProcess:
    return GpuProcess.model_validate({"pid": pid, "gpu": gpu, "uuid": f"GPU-{gpu}", **fields})


def look(world: World, *processes: GpuProcess, gpus: tuple[int, ...] = (0, 1), problem: str = "") -> None:
    """Let the next look at the cluster see this, and make it."""
    world.launcher.looks = (GpuLook(node=NODE, gpus=gpus, processes=processes, problem=problem),)
    world.clock.advance(60)
    world.turn()


def figures(world: World) -> dict[str, float]:
    """Value by metric, without its common beginning, and GPU."""
    found: dict[str, float] = {}
    for (name, labels), number in scrape(world).items():
        if name in NAMES:
            assert dict(labels)["node"] == NODE
            found[f"{name.removeprefix('dmuon_gpu_')} {dict(labels).get('gpu', '')}".strip()] = number
    return found


@pytest.mark.parametrize(
    ("process", "standing", "said"),
    [
        (holder(7, mark="a:2"), Standing.LIVE, "attempt 2 of job a"),
        (holder(7, mark="a:1"), Standing.STRAY, "attempt 1 of job a, which has ended"),
        (holder(7, mark="junk"), Standing.STRAY, "has ended or is not of this service"),
        (holder(7), Standing.STRAY, "nothing of this service started it"),
        (holder(7, found=False), Standing.UNKNOWN, "another process namespace"),
        (holder(0, found=False), Standing.UNKNOWN, "lists nobody"),
    ],
)
def test_whose_it_is_and_why(process: GpuProcess, standing: Standing, said: str) -> None:
    assert standing_of(process, frozenset({"a:2"})) is standing
    assert said in why(process, standing)


def test_a_process_is_nobodys_from_the_end_of_its_attempt_on(world: World) -> None:
    job = world.running()
    left = [holder(pid, mark=attempt_mark(job, 1)) for pid in (7, 8)]
    look(world, *left)
    clean = {"stray_processes 0": 0, "stray_processes 1": 0, "unresolved_processes": 0, "node_seen": 1}
    assert figures(world) == clean, "two workers share a GPU, and it is theirs"
    world.attempt(job).end(Reason.COMPLETED)
    world.turn(2)
    look(world, *left, holder(9, gpu=1, command="train.py", user="somebody"))
    assert figures(world) == clean | {"stray_processes 0": 2, "stray_processes 1": 1}
    look(world)
    assert figures(world) == clean


def test_what_is_not_known_is_no_leak_and_no_all_clear(world: World) -> None:
    look(world, holder(7, found=False), holder(0, gpu=1, found=False))
    assert figures(world) == {
        "stray_processes 0": 0, "stray_processes 1": 0, "unresolved_processes": 2, "node_seen": 1,
    }  # fmt: skip
    look(world, holder(7), gpus=(0,), problem="GPU 1 is lost")
    assert figures(world) == {"stray_processes 0": 1, "unresolved_processes": 0, "node_seen": 0}
    look(world, gpus=(), problem="it did not answer within 15 s")
    assert figures(world) == {"node_seen": 0}
    world.launcher.unreachable = True
    look(world)
    assert figures(world) == {}
    assert world.client.get("/v1/gpus").json() == {"at": None, "nodes": [], "holders": []}
    world.launcher.unreachable, world.launcher.looks = False, ()
    world.clock.advance(60)
    world.turn()
    assert figures(world) == {}, "a cluster without GPUs"
    assert world.client.get("/v1/gpus").json()["at"] == world.clock.now


def test_an_attempt_that_begins_or_ends_while_nodes_answer_is_live(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.running()
    seen: list[str] = []

    def answer() -> tuple[GpuLook, ...]:
        world.launcher.attempts[first, 1].end(Reason.COMPLETED)
        second = world.running()
        assert world.state(first) == "SUCCEEDED"
        seen.extend((first, second))
        return (GpuLook(node=NODE, gpus=(0,), processes=tuple(holder(7, mark=f"{job}:1") for job in seen)),)

    monkeypatch.setattr(world.launcher, "gpu_looks", answer)
    watch = world.reconciler.gpus
    watch.look()
    assert watch.sight is not None and watch.sight.count(watch.sight.looks[0], Standing.STRAY) == {0: 0}
    assert len(seen) == 2


def test_nodes_are_asked_now_and_then_and_a_reason_is_logged_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[float] = []
    unseen = (GpuLook(node=NODE, problem="no driver"), GpuLook(node=OTHER))

    def answer() -> tuple[GpuLook, ...]:
        asked.append(world.clock.now)
        return unseen

    monkeypatch.setattr(world.launcher, "gpu_looks", answer)
    begin = world.clock.now
    for _ in range(13):
        world.turn()
        world.clock.advance(10)
    assert asked == [begin, begin + 60, begin + 120]
    assert [record.message for record in caplog.records if "GPU" in record.message] == [
        f"GPUs of node {NODE} are not seen: no driver"
    ]


def test_a_node_that_hangs_holds_up_no_pass(world: World) -> None:
    release, passes = threading.Event(), threading.Semaphore(0)

    class Hanging(FakeLauncher):
        def gpu_looks(self) -> tuple[GpuLook, ...]:
            assert release.wait(30)
            return ()

    reconciler = Reconciler(
        world.database, Hanging(), FakePlanner(), FakeClock(), interval_s=0.01, patience_s=30,
        timed=lambda _seconds: passes.release(),
    )  # fmt: skip
    reconciler.start()
    try:
        assert all(passes.acquire(timeout=10) for _ in range(3)), "a pass waits for the node"
        assert reconciler.gpus.sight is None
    finally:
        release.set()
        reconciler.stop()


def test_the_operator_sees_who_it_is(world: World, client: Client) -> None:  # noqa: F811
    assert "nobody knows" in run("gpus")
    job = world.running()
    world.launcher.looks = (
        GpuLook(
            node=NODE, gpus=(0,), processes=(
                holder(7, mark=f"{job}:1", command="ray::RankActor.run"),
                holder(8, bytes=3 << 29, user="eve", command="python \x1b[2Jtrain.py", started_at=0.0),
                holder(0, found=False),
            ),
        ),
        GpuLook(node=OTHER, problem="it did not answer within 15 s"),
    )  # fmt: skip
    world.clock.advance(60)
    world.turn()
    text = run("gpus")
    assert "nodes with GPUs: 2, seen: 1" in text
    assert f"{OTHER}  NOT SEEN: it did not answer within 15 s" in text
    assert f"{NODE}  GPU 0  process 8  1.50 GiB  eve  since 1970" in text and "  python train.py\n" in text
    assert "stray: nothing of this service started it" in text and "process 7" not in text
    assert f"{NODE}  GPU 0  no process  ? GiB\n  unknown: " in text
    assert f"live: attempt 1 of job {job}" in run("gpus", "--all")
    listed = json.loads(run("gpus", "--json"))
    assert [entry["standing"] for entry in listed["holders"]] == ["live", "stray", "unknown"]
    world.launcher.looks = (GpuLook(node=NODE, gpus=(0,)),)
    world.clock.advance(60)
    world.turn()
    assert "no process was seen that belongs to no attempt\n" in run("gpus")
    world.launcher.looks = (GpuLook(node=NODE, problem="no driver"),)
    world.clock.advance(60)
    world.turn()
    assert "no process" not in run("gpus"), "nobody looked: no all-clear"
    assert "gpus" in runner.invoke(app, ["--help"]).output


def test_command_lines_are_for_the_operator_alone(world: World) -> None:
    with world.settings.token_file.open("a") as file:
        file.write("only-reads jobs:read\n")
    known = Authenticator.from_file(world.settings.token_file)._principals
    world.app.state.service.authenticator._principals.update(known)
    problem(world.client.get("/v1/gpus", headers={"Authorization": "Bearer only-reads"}), 403, "forbidden")
    assert world.client.get("/v1/gpus").status_code == 200
