"""Whose a process is, told so that others on its machine can read it for as long as it lives.

A rank holds a file in memory open whose name is its attempt's mark: whatever it forks holds it too. The programs that
it starts have the mark in their environment. Neither needs an answer of the process, nor anything that outlives it.
Both can be read by the same user and by root.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

from worker.settings import ATTEMPT_VARIABLE, hand_on_mark

__all__ = ["mark_of", "mark_process", "open_files"]

_NAME = "dmuon-attempt:"
_LINK, _GONE = f"/memfd:{_NAME}", " (deleted)"


def mark_process(mark: str) -> None:
    """Mark this process, what it forks from now on and what it starts."""
    if hasattr(os, "memfd_create"):  # Linux; nowhere else are processes looked at
        os.memfd_create(f"{_NAME}{mark}")  # never closed: it goes with the process
    hand_on_mark(mark)


def open_files(pid: int) -> tuple[str, ...] | None:
    """Return what the process holds open, as ``/proc`` names it; None when that cannot be read."""
    folder, found = f"/proc/{pid}/fd", []
    try:
        for name in os.listdir(folder):
            try:
                found.append(os.readlink(f"{folder}/{name}"))
            except FileNotFoundError:  # closed meanwhile
                continue
    except OSError:
        return None
    return tuple(found)


def mark_of(process: psutil.Process, opened: Iterable[str]) -> str:
    """Return the mark of a process that holds the files ``opened``; empty when it bears none that can be read."""
    for link in opened:
        if link.startswith(_LINK):
            return link.removeprefix(_LINK).removesuffix(_GONE)
    try:
        return process.environ().get(ATTEMPT_VARIABLE, "")
    except (OSError, psutil.Error):
        return ""
