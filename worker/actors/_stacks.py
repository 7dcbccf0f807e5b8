"""Stacks of all threads of a process, also of one that holds the interpreter's lock or answers nothing."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from typing import IO

__all__ = ["capture_stacks", "offer_stacks"]

_WAIT_S = 2.0
_LIMIT = 12_000
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "in uninterruptible input or output"}
_file: IO[str] | None = None


def offer_stacks() -> int:
    """Make SIGUSR2 write the stacks of this process to a file that has no name; return its descriptor.

    The file is kept open for as long as the process lives, and is gone with it.
    """
    global _file
    if _file is None:
        _file = tempfile.TemporaryFile("w", prefix="dmuon-stacks")  # noqa: SIM115 (open as long as the process lives)
        faulthandler.register(signal.SIGUSR2, file=_file, all_threads=True, chain=False)
    return _file.fileno()


def capture_stacks(processes: list[tuple[int, int, int]]) -> list[str]:
    """Return the stacks of processes of this machine, or why there are none.

    Args:
        processes: (pid, start in clock ticks since boot, descriptor of :func:`offer_stacks`).
    """
    return [_capture(*process) for process in processes]


def _capture(pid: int, started: int, descriptor: int) -> str:
    state = _state_of(pid, started)
    if state in ("", "Z", "X"):
        return "the process is gone"
    if state in _STATES:
        return f"no stacks: the process is {_STATES[state]}"
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        before = os.stat(path).st_size
        os.kill(pid, signal.SIGUSR2)
        deadline, size = time.monotonic() + _WAIT_S, before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = os.stat(path).st_size
            if now == size > before:
                break
            size = now
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(before)
            text = file.read()
    except OSError as error:
        return f"no stacks: {error}"
    return text[:_LIMIT] or f"no stacks: the process did not answer its signal within {_WAIT_S:g} s"


def _state_of(pid: int, started: int) -> str:
    """Return the letter of a process's state; empty when it is gone or its id is another's."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[0] if int(fields[19]) == started else ""
