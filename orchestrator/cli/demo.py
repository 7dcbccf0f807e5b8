"""One job from end to end on a service that is brought up for it and taken down after it."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console

from orchestrator.cli._console import FAILED
from orchestrator.cli.follow import follow
from orchestrator.cli.own_service import OwnService
from orchestrator.errors import ServiceError

__all__ = ["run_demo"]


def run_demo(spec: Path, console: Console, *, num_cpus: int | None, timeout_s: float) -> int:
    """Run the job that ``spec`` describes; return the exit code.

    The service is a child process with a state directory of its own. Whatever happens, it and its Ray are ended and
    the machine is searched for processes that they left.
    """
    state_dir = Path(tempfile.mkdtemp(prefix="dmuon-demo-"))
    service = OwnService(state_dir, num_cpus=num_cpus)
    succeeded = False
    try:
        with service:
            succeeded = _run_job(service, spec, console, timeout_s)
    except ServiceError as error:
        console.print(f"{error.title}: {error}", style="red", markup=False)
    if service.left:
        console.print(f"processes that were left behind: {service.left}", style="bold red", markup=False)
    if succeeded and not service.left:
        console.print("The service and its Ray are down; no process is left.")
        shutil.rmtree(state_dir, ignore_errors=True)
        return 0
    console.print(f"--- the end of {service.log} ---\n{service.log_tail()}", markup=False)
    return FAILED


def _run_job(service: OwnService, spec: Path, console: Console, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    with service.client() as client:
        job = client.submit(spec.read_text())
        console.print(f"job {job.id} ({job.name}) was submitted to a service of its own, {service.url}", markup=False)
        job = follow(client, job.id, console, detach_hint="The demo ends.", deadline=deadline)
    return job.state == "SUCCEEDED"
