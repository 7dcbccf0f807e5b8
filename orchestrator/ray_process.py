"""Ray as a process of its own, so that the control plane can end without a job noticing.

It listens on the loopback interface only and asks everybody for a token.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from orchestrator.errors import RayProcessError
from orchestrator.processes import ProcessRecord, end_processes, free_port, session_processes
from orchestrator.settings import Settings, child_environment, ensure_secret, ray_auth_environment

__all__ = ["is_whole", "live_ray", "start_ray", "stop_ray"]

_START_S, _STOP_S = 60.0, 10.0
_READY = "Ray runtime started"
_DEATHS_ARE_SEEN_SOON = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000"}
"""A node whose process is gone is told dead after five refused looks; one that is only slow has ten seconds a look."""
_PARTS = frozenset({"gcs_server", "raylet"})


def _record_path(settings: Settings) -> Path:
    return settings.state_dir / "ray.json"


def live_ray(settings: Settings) -> ProcessRecord | None:
    """Return the record of the Ray that was started for this state directory, if it still runs."""
    return ProcessRecord.load(_record_path(settings))


def start_ray(settings: Settings, *, num_cpus: int | None = None) -> ProcessRecord:
    """Join the Ray of this state directory, or start one; ``num_cpus`` None offers all of the machine's.

    Raises:
        RayProcessError: it did not come up; the error holds the end of its log.
    """
    found = live_ray(settings)
    if found is not None and _whole(found):
        return found
    stop_ray(settings)  # what is left of one that has died: processes without a head, its directory
    ensure_secret(settings.ray_token_file)
    # Ray puts sockets below its directory, and the path of a socket may have 107 bytes: a short one of our own.
    temp_dir = tempfile.mkdtemp(prefix="dm-")
    port, log = free_port(), settings.state_dir / "ray.log"
    with log.open("w") as output:
        child = subprocess.Popen(
            _command(port, temp_dir, num_cpus),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment({**_DEATHS_ARE_SEEN_SOON, **ray_auth_environment(settings.ray_token_file)}),
        )
    record = ProcessRecord.of(child.pid, f"127.0.0.1:{port}", temp_dir)
    record.save(_record_path(settings))
    _wait_until_ready(settings, child, log)
    return record


def is_whole(settings: Settings) -> bool:
    """Tell whether the Ray of this state directory lives with all that a job needs of it."""
    record = live_ray(settings)
    return record is not None and _whole(record)


def _whole(record: ProcessRecord) -> bool:
    """True when the parts of Ray without which no job runs are alive; its head stays up when they die."""
    names = {process.name() for process in session_processes(record.pid) if _runs(process)}
    return names >= _PARTS


def _command(port: int, temp_dir: str, num_cpus: int | None) -> list[str]:
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    words += ["--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={temp_dir}"]
    words += [f"--dashboard-agent-listen-port={free_port()}"]
    words += ["--include-dashboard=false", "--disable-usage-stats"]
    return words + ([] if num_cpus is None else [f"--num-cpus={num_cpus}"])


def _wait_until_ready(settings: Settings, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while _READY not in log.read_text(errors="replace"):
        ended = child.poll() is not None
        if ended or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            what = f"ended with code {child.returncode}" if ended else f"was not ready after {_START_S:g} s"
            stop_ray(settings)
            raise RayProcessError(f"Ray {what}; the end of {log}:\n{tail}")
        time.sleep(0.1)


def stop_ray(settings: Settings) -> list[int]:
    """End the Ray of this state directory with all its processes.

    Returns:
        Ids of its processes that still run, which should be none.
    """
    path = _record_path(settings)
    try:
        record = ProcessRecord.model_validate_json(path.read_text())
    except (OSError, ValueError):
        return []
    head = record.process()
    left: list[int] = []
    if head is not None:
        left = end_processes(head, session_processes(record.pid), patience_s=_STOP_S)
        left += [process.pid for process in session_processes(record.pid) if _runs(process)]
    elif orphans := _orphans(record):
        left = end_processes(orphans[0], orphans[1:], patience_s=_STOP_S)
    if record.temp_dir is not None and not left:
        shutil.rmtree(record.temp_dir, ignore_errors=True)
    if not left:
        path.unlink(missing_ok=True)
    return left


def _orphans(record: ProcessRecord) -> list[psutil.Process]:
    """Return what a dead head left: members of its session that name its directory, or bear Ray's own name."""
    found = []
    for process in session_processes(record.pid):
        try:
            line, born_at = " ".join(process.cmdline()), process.create_time()
        except psutil.Error:
            continue
        if born_at >= record.born_at and (line.startswith("ray::") or (record.temp_dir or "\0") in line):
            found.append(process)
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
