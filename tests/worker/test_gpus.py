"""Who holds a GPU: real processes, and NVML's own functions and errors with other answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from tests.architecture.source import ROOT
from worker import gpus
from worker.contract.gpus import GpuLook, GpuProcess, attempt_mark

CHILD = """
import os, subprocess, sys, time
device = open(sys.argv[1]); os.set_inheritable(device.fileno(), True)
if len(sys.argv) > 2:
    from worker.marks import mark_process
    mark_process(sys.argv[2])
started = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
forked = os.fork()
if forked:
    print(os.getpid(), started.pid, forked, flush=True)
time.sleep(60)
"""
"""Holds the file ``argv[1]`` open, and so do a program that it starts and a process that it forks."""


@dataclass
class Nvml:
    """What NVML is to say: by GPU, ids of processes and bytes; ``errors`` has what a function raises there."""

    compute: list[list[tuple[int, int | None]]] = field(default_factory=lambda: [[]])
    mps: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    used: int = 0
    errors: dict[tuple[str, int], int] = field(default_factory=dict)
    open: int = 0

    def answer(self, name: str, handle: int, value: Any) -> Any:
        code = self.errors.get((name, handle))
        if code is not None:
            raise pynvml.NVMLError(code)
        return value


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nvml:
    """A driver whose devices lie in the test's directory."""
    said = Nvml()

    def put(name: str, answer: Callable[..., Any]) -> None:
        assert hasattr(pynvml, name), f"NVML has no {name}"
        monkeypatch.setattr(pynvml, name, answer)

    def listed(entries: list[tuple[int, int | None]]) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in entries]

    def opened(by: int) -> None:
        said.answer("init", 0, None)
        said.open += by

    put("nvmlInit", lambda: opened(1))
    put("nvmlShutdown", lambda: opened(-1))
    put("nvmlDeviceGetCount", lambda: said.answer("count", 0, len(said.compute)))
    put("nvmlDeviceGetHandleByIndex", lambda index: index)
    put("nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}abc")
    put(
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: said.answer("compute", handle, listed(said.compute[handle])),
    )
    put("nvmlDeviceGetMPSComputeRunningProcesses", lambda handle: said.answer("mps", handle, listed(said.mps)))
    put(
        "nvmlDeviceGetMemoryInfo",
        lambda handle, version: said.answer("memory", handle, SimpleNamespace(used=said.used)),
    )
    put("nvmlDeviceGetGraphicsRunningProcesses", lambda handle: listed(said.graphics))
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "DEVICES", (str(tmp_path / "nvidia"),))
    return said


Start = Callable[..., tuple[int, int, int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start :data:`CHILD` with a mark or without; returns its id, its program's and its fork's."""
    children: list[subprocess.Popen[str]] = []

    def begin(*mark: str) -> tuple[int, int, int]:
        words = [sys.executable, "-c", CHILD, str(tmp_path / "nvidia0"), *mark]
        children.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True))
        assert children[-1].stdout is not None
        first, second, third = map(int, children[-1].stdout.readline().split())
        return first, second, third

    yield begin
    for child in children:
        os.killpg(child.pid, signal.SIGKILL)  # a session of its own: all of it is this test's
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def marks(look: GpuLook) -> dict[int, str]:
    return {process.pid: process.mark for process in look.processes if process.found}


def test_what_an_attempt_forks_and_starts_bears_its_mark_and_a_strangers_process_none(nvml: Nvml, start: Start) -> None:
    own, stranger = start(attempt_mark("job-a", 3)), start()
    nvml.compute = [[(pid, 1 << 30) for pid in (*own, *stranger)]]
    look = gpus.look_at_gpus(1)
    assert (look.gpus, look.problem, nvml.open) == ((0,), "", 0)
    assert marks(look) == dict.fromkeys(own, "job-a:3") | dict.fromkeys(stranger, "")
    seen = {process.pid: process for process in look.processes}[stranger[1]]
    assert (seen.command, seen.user, seen.bytes, seen.uuid) == (
        "sleep 60", psutil.Process().username(), 1 << 30, "GPU-0abc",
    )  # fmt: skip
    assert seen.started_at is not None and abs(time.time() - seen.started_at) < 60
    os.kill(own[0], signal.SIGKILL)
    os.waitpid(own[0], 0)
    assert marks(gpus.look_at_gpus(1)) == dict.fromkeys(own[1:], "job-a:3") | dict.fromkeys(stranger, ""), (
        "what a dead rank left is still told to be its attempt's"
    )


def test_who_it_is_cannot_always_be_told(nvml: Nvml, start: Start) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    nvml.compute = [[(gone.pid, None), (os.getpid(), 5)]]  # this process has no device open: the id is another's
    look = gpus.look_at_gpus(1)
    assert [(p.pid, p.found, p.bytes, p.command) for p in look.processes] == [
        (gone.pid, False, None, ""), (os.getpid(), False, 5, ""),
    ]  # fmt: skip
    assert look.problem == "" and look.gpus == (0,)


def test_memory_that_nobody_is_listed_for_is_unknown(nvml: Nvml) -> None:
    nvml.used = 1 << 20
    assert gpus.look_at_gpus(1).processes == ()
    nvml.used = 1 << 30
    unlisted = GpuProcess(pid=0, gpu=0, uuid="GPU-0abc", bytes=1 << 30, found=False)
    assert gpus.look_at_gpus(1).processes == (unlisted,)
    nvml.graphics = [(1, 1 << 30)]
    assert gpus.look_at_gpus(1).processes == (), "a desktop"
    nvml.graphics = []
    nvml.errors["memory", 0] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert gpus.look_at_gpus(1) == GpuLook(gpus=(0,)), "an old driver does not say"


def test_clients_of_mps_count_and_its_server_does_not(nvml: Nvml, start: Start, tmp_path: Path) -> None:
    server = tmp_path / "nvidia-cuda-mps-server"
    server.symlink_to("/bin/sleep")
    with subprocess.Popen([server, "60"]) as process:
        client, *_ = start("job:1")
        nvml.compute, nvml.mps = [[(process.pid, 30 << 20), (client, 1)]], [(client, 7)]
        look = gpus.look_at_gpus(1)
        process.kill()
    assert [(p.pid, p.mark, p.bytes) for p in look.processes] == [(client, "job:1", 7)], "and once each"
    nvml.errors["mps", 0] = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvml.compute = [[(client, 1)]]
    assert marks(gpus.look_at_gpus(1)) == {client: "job:1"}


def test_a_node_without_a_driver_says_so_and_is_no_error(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.errors["init", 0] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    look = GpuLook.model_validate_json(gpus.answer("2"))
    assert look.gpus == () and look.problem.startswith("NVML cannot be used there (NVML Shared Library Not Found)")
    nvml.errors = {("count", 0): pynvml.NVML_ERROR_GPU_IS_LOST}
    assert (gpus.look_at_gpus(1).problem, nvml.open) == ("NVML failed there: GPU is lost", 0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.look_at_gpus(1).problem.startswith("nvidia-ml-py is not installed there; run: pip install")


def test_one_gpu_that_does_not_say_hides_no_other(nvml: Nvml, start: Start) -> None:
    child, *_ = start()
    nvml.compute = [[(child, 1)], [(child, 2)], []]
    nvml.errors["compute", 0] = pynvml.NVML_ERROR_NO_PERMISSION
    look = gpus.look_at_gpus(3)
    assert look.gpus == (1, 2) and [(p.gpu, p.bytes) for p in look.processes] == [(1, 2)]
    assert look.problem == "GPU 0 does not say who holds it: Insufficient Permissions"


@pytest.mark.parametrize(
    ("number", "visible", "expected"),
    [
        (4, (), [0, 1, 2, 3]), (2, (), [0, 1]), (2, ("1", "3"), [1, 3]), (2, ("GPU-2", "GPU-0abc"), [0, 2]),
        (4, ("1",), [0, 1, 2, 3]), (8, (), [0, 1, 2, 3]), (0.5, (), [0]), (1, ("MIG-7",), []),
    ],
)  # fmt: skip
def test_only_what_ray_was_given_is_promised(number: float, visible: tuple[str, ...], expected: list[int]) -> None:
    assert gpus.promised_gpus([f"GPU-{index}abc" for index in range(4)], number, visible) == expected


def test_gpus_that_are_not_rays_are_not_looked_at(nvml: Nvml, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    child, *_ = start()
    nvml.compute = [[(child, 1)], []]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert GpuLook.model_validate_json(gpus.answer("1")) == GpuLook(gpus=(1,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    look = GpuLook.model_validate_json(gpus.answer("1"))
    assert look.gpus == () and "NVML sees 2, and none of them is Ray's" in look.problem, "unknown, not free"


def test_a_command_that_is_no_text_breaks_no_look(nvml: Nvml, start: Start, tmp_path: Path) -> None:
    program = "import sys, time; device = open(sys.argv[1]); print(flush=True); time.sleep(60)"
    words = [sys.executable, "-c", program, str(tmp_path / "nvidia0"), b"\xff\n" + b"x" * 1000]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        nvml.compute = [[(child.pid, 1)]]
        look = GpuLook.model_validate_json(gpus.answer("1"))
        child.kill()
    (process,) = look.processes
    assert process.found and "\n" not in process.command and len(process.command) <= 310
