"""One job from end to end on a service that is brought up for it and taken down after it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

from orchestrator.cli._console import FAILED
from orchestrator.cli.follow import follow
from orchestrator.client import Client
from orchestrator.errors import RequestRefused, ServiceError, ServiceUnreachable
from orchestrator.processes import end_processes, helpers_of
from orchestrator.ray_process import live_ray, stop_ray
from orchestrator.settings import Settings, child_environment

__all__ = ["run_demo"]

_UP_S = 120.0
_LOG_TAIL = 4000


def run_demo(spec: Path, console: Console, *, num_cpus: int | None, timeout_s: float) -> int:
    """Run the job that ``spec`` describes; return the exit code.

    The service is a child process with a state directory of its own. Whatever happens, it and its Ray are ended and
    the machine is searched for processes that they left.
    """
    state_dir = Path(tempfile.mkdtemp(prefix="dmuon-demo-"))
    settings = Settings(state_dir=state_dir, port=_free_port())
    log = state_dir / "server.log"
    child = _start_server(settings, log, num_cpus)
    try:
        succeeded = _run_job(settings, child, spec, console, timeout_s)
    except ServiceError as error:
        console.print(f"{error.title}: {error}", style="red", markup=False)
        succeeded = False
    finally:
        left = _take_down(settings, child)
    if left:
        console.print(f"processes that were left behind: {left}", style="bold red", markup=False)
    if succeeded and not left:
        console.print("The service and its Ray are down; no process is left.")
        shutil.rmtree(state_dir, ignore_errors=True)
        return 0
    tail = log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""
    console.print(f"--- the end of {log} ---\n{tail}", markup=False)
    return FAILED


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_server(settings: Settings, log: Path, num_cpus: int | None) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "orchestrator", "up", "--port", str(settings.port)]
    words += [] if num_cpus is None else ["--num-cpus", str(num_cpus)]
    with log.open("wb") as output:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment({"DMUON_STATE_DIR": str(settings.state_dir)}),
        )


def _run_job(
    settings: Settings, child: subprocess.Popen[bytes], spec: Path, console: Console, timeout_s: float
) -> bool:
    _wait_until_up(settings, child)
    token = settings.token_file.read_text().split()[0]
    deadline = time.monotonic() + timeout_s
    with Client(f"http://{settings.host}:{settings.port}", token) as client:
        job = client.submit(spec.read_text())
        console.print(f"job {job.id} ({job.name}) was submitted to a service of its own", markup=False)
        job = follow(client, job.id, console, detach_hint="The demo ends.", deadline=deadline)
    return job.state == "SUCCEEDED"


def _wait_until_up(settings: Settings, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise ServiceUnreachable(f"the service ended with code {child.returncode} while it started")
        if settings.token_file.exists() and _answers(settings):
            return
        time.sleep(0.2)
    raise ServiceUnreachable(f"the service did not come up within {_UP_S:g} s")


def _answers(settings: Settings) -> bool:
    words = settings.token_file.read_text().split()
    try:
        with Client(f"http://{settings.host}:{settings.port}", words[0] if words else None, timeout_s=5.0) as client:
            client.jobs(page_size=1)
    except (ServiceUnreachable, RequestRefused):
        return False
    return True


def _take_down(settings: Settings, child: subprocess.Popen[bytes]) -> list[int]:
    """End everything that was started; return the ids of what is left."""
    ray = live_ray(settings)
    leaders = {child.pid} | ({ray.pid} if ray is not None else set())
    if child.poll() is None:
        server = psutil.Process(child.pid)
        end_processes(server, helpers_of(server), patience_s=15.0)
    child.wait(10.0)
    stop_ray(settings)
    left = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) in leaders and process.info["status"] != psutil.STATUS_ZOMBIE:
                left.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return left
