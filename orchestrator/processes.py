"""Processes that this service started, by id and time of birth, so that a reused id is never taken for one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

__all__ = ["ProcessRecord", "end_processes", "free_port", "helpers_of", "session_processes"]


class ProcessRecord(BaseModel):
    """A process, and where it can be spoken to."""

    model_config = ConfigDict(frozen=True)

    pid: int
    born_at: float
    address: str
    temp_dir: str | None = None

    @classmethod
    def of(cls, pid: int, address: str, temp_dir: str | None = None) -> ProcessRecord:
        """Record a process that runs now."""
        return cls(pid=pid, born_at=psutil.Process(pid).create_time(), address=address, temp_dir=temp_dir)

    @classmethod
    def load(cls, path: Path) -> ProcessRecord | None:
        """Read a record; None when there is none, or its process is gone."""
        try:
            record = cls.model_validate_json(path.read_text())
        except (OSError, ValueError):
            return None
        return record if record.process() is not None else None

    def save(self, path: Path) -> None:
        """Write the record, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(self.model_dump_json())
        partial.replace(path)

    def process(self) -> psutil.Process | None:
        """Return the process if it still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.born_at) < 0.01 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return None
        return process if same else None


def free_port() -> int:
    """Return a free port outside 10002 to 19999, where Ray's workers take theirs."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if not 10_000 <= port < 20_000:
            return port


def session_processes(leader: int) -> list[psutil.Process]:
    """Return the processes of the session that ``leader`` began, and the leader's descendants."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        found = {child.pid: child for child in psutil.Process(leader).children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader:
                found[process.pid] = process
    return list(found.values())


def helpers_of(process: psutil.Process) -> list[psutil.Process]:
    """Return a process's descendants that share its session: what began one of its own, like Ray, is no helper."""
    found: list[psutil.Process] = []
    with contextlib.suppress(OSError, psutil.Error):
        session = os.getsid(process.pid)
        for child in process.children(recursive=True):
            with contextlib.suppress(OSError):
                if os.getsid(child.pid) == session:
                    found.append(child)
    return found


def end_processes(first: psutil.Process, others: Iterable[psutil.Process], *, patience_s: float) -> list[int]:
    """Ask ``first`` to end, then end by force what is left of all of them.

    Returns:
        The ids of those that still run.
    """
    everybody = {process.pid: process for process in (first, *others)}
    _signal(first, signal.SIGTERM)
    _, alive = psutil.wait_procs(list(everybody.values()), timeout=patience_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    _, alive = psutil.wait_procs(alive, timeout=5.0)
    deadline = time.monotonic() + 1.0
    while alive and time.monotonic() < deadline:
        alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    return [process.pid for process in alive]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)  # psutil checks that the id was not reused
