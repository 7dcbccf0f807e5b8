"""The launcher behind a pipe: every call and every error crosses it, and a child that dies is no evidence."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from orchestrator.call_process import CallProcess
from orchestrator.errors import LauncherUnavailable, StartFailed, SupervisorGone
from orchestrator.launcher_api import AttemptRef, Capacity, Resources
from orchestrator.launcher_process import ProcessLauncher
from tests.orchestrator.fakes import make_report, make_spec
from worker.contract.kernels import Kernel, KernelPolicy
from worker.contract.messages import AttemptStart, StopRequest
from worker.contract.states import Reason

SCRIPT = """
import os, sys, time
from orchestrator.errors import StartFailed
from orchestrator.launcher_process import serve_calls
from tests.orchestrator.fakes import FakeLauncher, make_report
from worker.contract.gpus import GpuLook, GpuProcess

class Launcher(FakeLauncher):
    def start_attempt(self, start):
        if start.job_id == "broken":
            raise StartFailed("no module")
        if start.job_id == "odd":
            raise KeyError("odd")
        if start.job_id == "die":
            os._exit(9)
        if start.job_id == "slow":
            time.sleep(30)
        super().start_attempt(start)
        self.attempts[start.job_id, start.attempt].push(make_report(0, 1, loss=float("nan")))

    def leave(self, ref):
        found = self.attempts[ref.job_id, ref.attempt]
        assert found.stops[0].message == "why" and found.policies[0].epoch == 3, found
        super().leave(ref)

    def run_entry(self, request):
        return request.upper()

print("chatter", flush=True)
launcher = Launcher(cpus=8)
launcher.looks = (GpuLook(node="10.0.0.5", gpus=(0,), processes=(GpuProcess(pid=7, gpu=0, uuid="GPU-a", mark="j:1"),)),)
serve_calls(launcher, sys.stdin, sys.stdout)
"""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessLauncher]:
    found = ProcessLauncher("nowhere")
    monkeypatch.setattr(found, "_child", CallProcess([sys.executable, "-c", SCRIPT], what="test"))
    yield found
    found.close()


def start(job_id: str) -> AttemptStart:
    spec = make_spec().model_dump_json()
    return AttemptStart(job_id=job_id, attempt=1, fence="f", spec_json=spec, plan_hash="p")


def test_every_call_crosses(launcher: ProcessLauncher) -> None:
    ref = AttemptRef("j", 1, "f")
    assert launcher.capacity() == Capacity((Resources(8),), Resources(8))
    (look,) = launcher.gpu_looks()
    assert (look.node, look.processes[0].pid, look.processes[0].mark) == ("10.0.0.5", 7, "j:1")
    with pytest.raises(SupervisorGone, match="no such actor"):
        launcher.poll(ref, 0, 10)
    launcher.start_attempt(start("j"))
    (entry,) = launcher.poll(ref, 0, 10).entries
    assert repr(entry.body) == repr(make_report(0, 1, loss=float("nan")))
    assert launcher.poll(ref, 1, 10).entries == ()
    launcher.set_kernels(ref, KernelPolicy(epoch=3, tripped=frozenset({Kernel.QUACK})))
    launcher.stop(ref, StopRequest(reason=Reason.CANCELLED, message="why"))
    launcher.leave(ref)
    assert launcher.remains(ref) == ()
    launcher.start_attempt(start("k"))
    launcher.kill(AttemptRef("k", 1, "f"))
    with pytest.raises(SupervisorGone):
        launcher.poll(AttemptRef("k", 1, "f"), 0, 10)
    assert launcher.run_entry("x") == "X"


def test_every_error_crosses(launcher: ProcessLauncher) -> None:
    with pytest.raises(StartFailed, match="no module"):
        launcher.start_attempt(start("broken"))
    with pytest.raises(LauncherUnavailable, match="KeyError"):
        launcher.start_attempt(start("odd"))


def test_a_child_that_dies_says_nothing_about_the_attempt(launcher: ProcessLauncher) -> None:
    with pytest.raises(LauncherUnavailable, match="code 9"):
        launcher.start_attempt(start("die"))
    assert launcher.capacity().nodes  # by a new child


def test_a_call_that_hangs_holds_up_no_other(launcher: ProcessLauncher) -> None:
    """Answers come in any order; when the child dies, everybody who waits for it hears of that."""
    found: list[str] = []

    def hang() -> None:
        try:
            launcher.start_attempt(start("slow"))
        except LauncherUnavailable as error:
            found.append(error.detail)

    launcher.capacity()  # the child is up
    threads = [threading.Thread(target=hang) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        launcher.capacity()
    assert not found and all(thread.is_alive() for thread in threads)
    with pytest.raises(LauncherUnavailable, match="code 9"):
        launcher.start_attempt(start("die"))
    for thread in threads:
        thread.join(10)
    assert len(found) == 3 and launcher.capacity().nodes


def test_moved_to_another_cluster(launcher: ProcessLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher.capacity() == Capacity((Resources(8),), Resources(8))
    other = [sys.executable, "-c", SCRIPT.replace("cpus=8", "cpus=3")]
    monkeypatch.setattr("orchestrator.launcher_process._command", lambda address: other if address == "b" else [])
    launcher.move("b")
    assert launcher.capacity() == Capacity((Resources(3),), Resources(3))
