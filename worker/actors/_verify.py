"""Whether processes of a node are really gone."""

from __future__ import annotations

import contextlib
import os
import signal

__all__ = ["survivors"]


def survivors(processes: list[tuple[int, int]], kill: bool) -> list[int]:
    """Return the pids of those that are still alive on this machine; a zombie is not.

    Args:
        processes: (pid, start in clock ticks since boot): a reused pid is another process.
        kill: send SIGKILL to the survivors.
    """
    alive = []
    for pid, started in processes:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] in ("Z", "X") or int(fields[19]) != started:
            continue
        alive.append(pid)
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return alive
