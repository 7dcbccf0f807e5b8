"""The supervisor on a real Ray: how attempts end, and that nothing of them is left."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from orchestrator.launcher import RayLauncher
from worker.contract.actors import NAMESPACE, rank_name, supervisor_name
from worker.contract.gpus import GpuLook
from worker.contract.kernels import KernelPolicy
from worker.contract.load import validate_spec
from worker.contract.messages import AttemptEnd, AttemptStart, Entry, Milestone, PollBatch, RankError, StopRequest
from worker.contract.spec import JobSpec
from worker.contract.states import Reason

pytestmark = pytest.mark.service
HELPERS = Path(__file__).parent / "ray_helpers"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray of four logical CPUs on loopback, in a directory of its own, that ends with this module."""
    directory = tempfile.mkdtemp(prefix="ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{HELPERS}:{HELPERS / 'nvml'}")
        patch.setenv("FAKE_NVML", f"{directory}/nvml.json")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.syspath_prepend(str(HELPERS))
        ray.init(
            address="local", num_cpus=4, num_gpus=1, _node_ip_address="127.0.0.1", _temp_dir=directory,
            include_dashboard=False, object_store_memory=80_000_000, namespace="tests",
            log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
        yield
        ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


def spec(
    world_size: int = 2,
    cpus: float = 0.5,
    steps: int = 8,
    fault: str = "",
    watchdog: dict[str, float] | None = None,
    **failure: float,
) -> JobSpec:
    return validate_spec(
        {
            "api_version": "v1",
            "name": "fake",
            "labels": {"fault": fault},
            "model": {"type": "llama"},
            "data": {"sequence_length": 8},
            "mesh": {"shard": world_size},
            "training": {"steps": steps, "global_batch": 12},
            "resources": {"cpus_per_worker": cpus},
            "failure": failure,
            "watchdog": watchdog or {},
        }
    )


class Driven:
    """An attempt that the test drives as the control plane would."""

    def __init__(self, job: JobSpec, name: str, **start: Any) -> None:
        self.start = AttemptStart(
            job_id=name, attempt=1, fence="secret", spec_json=job.model_dump_json(), plan_hash="", **start
        )
        self.actor = ray.remote(importlib.import_module("fake_ranks").FakeSupervisor).options(
            name=supervisor_name(name, 1), namespace=NAMESPACE, lifetime="detached", max_concurrency=32, num_cpus=0
        ).remote()  # fmt: skip
        ray.get(self.actor.start.remote(self.start.model_dump_json()))
        self.entries: list[Entry] = []

    def poll(self) -> PollBatch:
        cursor = self.entries[-1].seq if self.entries else 0
        batch = PollBatch.model_validate_json(ray.get(self.actor.poll.remote("secret", cursor, 100)))
        self.entries += batch.entries
        return batch

    def until(self, text: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(
            isinstance(e.body, Milestone) and text in f"{e.body.name} {e.body.message}" for e in self.entries
        ):
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.entries}"
            self.poll()
            time.sleep(0.02)

    def end(self, timeout_s: float = 60) -> AttemptEnd:
        """Poll to the last entry, check that nothing is left, and send the supervisor away."""
        deadline = time.monotonic() + timeout_s
        while not self.poll().ended or not self.entries or self.entries[-1].body.kind != "end":
            assert time.monotonic() < deadline, f"no end: {self.entries}"
            time.sleep(0.02)
        body = self.entries[-1].body
        assert isinstance(body, AttemptEnd)
        assert [entry.seq for entry in self.entries] == list(range(1, len(self.entries) + 1))
        assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}
        assert rank_processes() == []
        ray.get(self.actor.stop.remote("secret", stop_request()))  # after the end: harmless
        self.actor.leave.remote("secret")
        return body

    def milestones(self) -> list[Milestone]:
        return [entry.body for entry in self.entries if isinstance(entry.body, Milestone)]

    def told_by(self, rank: int) -> list[str]:
        return [note.message for note in self.milestones() if note.rank == rank]

    def errors(self) -> list[RankError]:
        return [entry.body for entry in self.entries if isinstance(entry.body, RankError)]


def rank_processes() -> list[str]:
    """Live processes of rank actors under this Ray."""
    names = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "FakeRank" in title or "RankActor" in title:
            names.append(title)
    return names


def stop_request(patience_s: float = 10.0) -> str:
    return StopRequest(reason=Reason.CANCELLED, message="asked", patience_s=patience_s).model_dump_json()


def test_success_with_a_change_of_kernels_on_the_way() -> None:
    attempt = Driven(spec(steps=30), "success")
    attempt.until("group_formed")
    assert len(rank_processes()) == 2, "the test can see them"
    ray.get(attempt.actor.set_kernels.remote("secret", KernelPolicy(epoch=4).model_dump_json()))
    end = attempt.end()
    assert (end.reason, end.message) == (Reason.COMPLETED, "all 2 ranks did all steps")
    assert [note.name for note in attempt.milestones()][:3] == ["placed", "workers_started", "group_formed"]
    steps = [attempt.told_by(rank) for rank in (0, 1)]
    assert steps[0] == steps[1] and len(steps[0]) == 30, "every step of every rank was told, with one epoch each"
    assert steps[0][0] == "0 epoch 0" and steps[0][-1] == "29 epoch 4"


def test_a_foreign_exception_arrives_whole() -> None:
    attempt = Driven(spec(fault="raise"), "raises")
    end = attempt.end()
    assert end.reason == Reason.USER_ERROR
    assert end.message == "rank 1: fake_ranks.KeywordOnly: gave up with 7"
    (error,) = [entry.error for entry in attempt.errors() if entry.error.type == "fake_ranks.KeywordOnly"]
    assert (error.rank, error.fields) == (1, {"number": "7"})
    assert "_misbehave" in error.traceback


def test_a_process_that_vanishes_is_a_lost_worker() -> None:
    attempt = Driven(spec(fault="exit"), "exits")
    attempt.until("2 epoch")
    begin = time.monotonic()
    end = attempt.end()
    assert end.reason == Reason.WORKER_LOST and "rank 1 is gone" in end.message
    assert time.monotonic() - begin < 6


@pytest.mark.parametrize(("fault", "stack"), [("hang", "_misbehave"), ("stop", "stopped by a signal")])
def test_a_rank_that_hangs_is_named_with_all_stacks_and_ends_the_attempt(fault: str, stack: str) -> None:
    attempt = Driven(spec(fault=fault, watchdog={"silent_s": 3.0, "forward_s": 2.0, "compile_s": 2.0}), fault)
    attempt.until("2 epoch")
    begin = time.monotonic()
    end = attempt.end()
    assert time.monotonic() - begin < 15, "detected within the deadline and 5 s, ended within 10 s more"
    assert end.reason == Reason.STALLED
    (stalled,) = [note for note in attempt.milestones() if note.name == "stalled"]
    assert stalled.message == end.message and stalled.data["ranks"] == "1"
    collective = stalled.data["collective"]  # a barrier of two may let one of them go when the other stops in it
    assert collective in ("the barrier", "agreement on what holds for this step")
    assert f"rank 0 waits for {collective}" in stalled.message
    stacks = {note.rank: str(note.data["stacks"]) for note in attempt.milestones() if note.name == "stacks"}
    waiting = "barrier" if collective == "the barrier" else "control.py"
    assert stack in stacks[1] and waiting in stacks[0], stacks


def test_cancel_stops_all_ranks_after_the_same_step() -> None:
    attempt = Driven(spec(steps=100_000), "cancelled")
    attempt.until("2 epoch")
    ray.get(attempt.actor.stop.remote("secret", stop_request()))
    end = attempt.end()
    assert (end.reason, end.message) == (Reason.CANCELLED, "asked")
    assert attempt.told_by(0) == attempt.told_by(1)


def test_ranks_on_a_gpu_are_told_from_others_and_a_node_that_hangs_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Driven(spec(steps=4000), "holds")
    attempt.until("group_formed")
    ranks = [ray.get_actor(rank_name("holds", 1, rank), namespace=NAMESPACE) for rank in (0, 1)]
    own = [int(place["pid"]) for place in ray.get([actor.hello.remote() for actor in ranks])]
    launcher, listed = RayLauncher("this Ray, which is joined already"), Path(os.environ["FAKE_NVML"])
    with subprocess.Popen(["sleep", "60"]) as stranger:
        listed.write_text(json.dumps([[pid, 1 << 30] for pid in (*own, stranger.pid)]))
        (look,) = launcher.gpu_looks()
        stranger.kill()
    here = ray.nodes()[0]["NodeManagerAddress"]
    assert (look.node, look.gpus, look.problem) == (here, (0,), "")
    assert {process.pid: process.mark for process in look.processes} == {
        own[0]: "holds:1", own[1]: "holds:1", stranger.pid: "",
    }  # fmt: skip
    assert ray.available_resources()["GPU"] == 1, "looking takes nothing of what is promised"
    ray.get(attempt.actor.stop.remote("secret", stop_request()))
    assert attempt.end().reason == Reason.CANCELLED
    listed.write_text("hang")
    monkeypatch.setattr("orchestrator.launcher._LOOK_S", 1.5)
    unseen = (GpuLook(node=here, problem="it did not answer within 1.5 s"),)
    with monkeypatch.context() as driver:
        driver.setattr(ray, "cancel", lambda *_, **__: None)  # a process that nobody can end
        assert launcher.gpu_looks() == unseen
        (reference,) = launcher._looking.values()
        assert launcher.gpu_looks() == unseen and launcher._looking == {here: reference}, "one is enough"
    assert launcher.gpu_looks() == unseen
    assert ray.wait([reference], timeout=10)[0], "this one can be ended"
    listed.write_text("raise")
    monkeypatch.setattr("orchestrator.launcher._LOOK_S", 15.0)
    problem = "looking failed there: RuntimeError: no such driver"
    assert launcher.gpu_looks() == (GpuLook(node=here, problem=problem),)


def test_ranks_that_do_not_listen_are_killed() -> None:
    attempt = Driven(spec(steps=100_000, fault="deaf"), "deaf")
    attempt.until("2 epoch")
    ray.get(attempt.actor.stop.remote("secret", stop_request(patience_s=0.5)))
    assert attempt.end().reason == Reason.CANCELLED


def test_what_the_cluster_never_has_is_infeasible() -> None:
    attempt = Driven(spec(cpus=64), "infeasible", placement_deadline_s=1.0)
    end = attempt.end()
    assert end.reason == Reason.INFEASIBLE
    assert "asked for 2 workers of 64 CPU" in end.message and "largest node 4 CPU" in end.message


def test_cancel_while_waiting_for_room() -> None:
    attempt = Driven(spec(cpus=64), "waiting", placement_deadline_s=60.0)
    ray.get(attempt.actor.stop.remote("secret", stop_request()))
    assert attempt.end(5).reason == Reason.CANCELLED


@pytest.mark.parametrize(
    ("fault", "told"), [("broken_import", "importing torch failed"), ("slow_import", "within 2 s")]
)
def test_a_set_up_that_fails_or_hangs(fault: str, told: str) -> None:
    attempt = Driven(spec(fault=fault, start_deadline_s=2.0 if fault == "slow_import" else 60.0), fault)
    end = attempt.end()
    assert end.reason == Reason.SETUP_FAILED and told in end.message


def test_real_training_through_the_entry_point(tmp_path: Path) -> None:
    from tests.worker.specs import tiny_spec
    from worker.checkpoints import newest_complete
    from worker.contract.actors import START_ENTRY
    from worker.contract.messages import RankReport
    from worker.contract.reports import rank_files, supervisor_files
    from worker.planner import make_plan

    assert START_ENTRY == "worker.actors.entry:start_supervisor"
    from worker.actors.entry import start_supervisor

    job = tiny_spec(2, kernels={"kernel": "blocked"})
    start = AttemptStart(
        job_id="real", attempt=3, fence="secret", spec_json=job.model_dump_json(), plan_hash=make_plan(job).plan_hash,
        checkpoint_directory=str(tmp_path / "real"), report_directory=str(tmp_path / "reports"),
    ).model_dump_json()  # fmt: skip
    for _ in range(2):  # the second time changes nothing
        ray.get(ray.remote(start_supervisor).options(num_cpus=0).remote(start))
    attempt = Driven.__new__(Driven)
    attempt.entries = []
    attempt.actor = ray.get_actor(supervisor_name("real", 3), namespace=NAMESPACE)
    end = attempt.end(120)
    assert end.reason == Reason.COMPLETED, (end, attempt.errors())
    reports = [entry.body for entry in attempt.entries if isinstance(entry.body, RankReport)]
    assert sorted((report.rank, report.step) for report in reports) == [(r, s) for r in (0, 1) for s in range(1, 6)]
    assert {total.kernel for report in reports for total in report.ns} == {"blocked"}
    names = [note.name for note in attempt.milestones()]
    assert names == [
        "placed", "workers_started", "group_formed", "plan_confirmed", "routes_verified", "checkpoint_saved",
    ]  # fmt: skip
    saved = newest_complete(tmp_path / "real")
    assert saved is not None and saved.step == 5, "in the place that the attempt was given"
    assert all(note.data["ok"] for note in attempt.milestones() if note.name == "routes_verified")
    files: dict[int | None, Path] = {rank: rank_files(tmp_path / "reports" / "3", rank)[0] for rank in (0, 1)}
    files[None] = supervisor_files(tmp_path / "reports" / "3")[0]
    for rank, path in files.items():
        kept = [Entry.model_validate_json(line) for line in path.read_text().splitlines()]
        told = [entry for entry in attempt.entries if entry.rank == rank]
        assert [(entry.number, entry.body) for entry in kept] == [(entry.number, entry.body) for entry in told], rank
        assert rank is None or [entry.number for entry in kept] == list(range(1, len(kept) + 1))
    assert kept[-1].body == end, "the supervisor's end too"


def test_a_wrong_fence_changes_nothing() -> None:
    attempt = Driven(spec(cpus=64), "fenced", placement_deadline_s=2.0)
    for call in (
        attempt.actor.poll.remote("other", 0, 1),
        attempt.actor.stop.remote("other", stop_request()),
        attempt.actor.push.remote("other", [], 5),
        attempt.actor.start.remote(attempt.start.model_copy(update={"fence": "other"}).model_dump_json()),
    ):
        with pytest.raises(ray.exceptions.RayTaskError, match="refused: its fencing token"):
            ray.get(call)
    assert attempt.end().reason == Reason.INFEASIBLE


def test_actor_modules_import_no_torch() -> None:
    code = "import sys, worker.actors.entry, worker.actors.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
