"""What a process has told, on disk: whoever kills it or its listener, what it told is read from there."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["Journal"]

_LIMIT_BYTES = 8 << 20


class Journal:
    """Lines in two files that take turns: at least the last ``limit_bytes`` are kept, and at most twice that.

    A line is in the kernel's hands when :meth:`append` returns, so it survives the process; nothing waits for the disk.
    The first file is locked while the process lives, which tells others that more may come.

    Raises:
        OSError: the files cannot be made or written.
    """

    def __init__(self, files: tuple[Path, Path], limit_bytes: int = _LIMIT_BYTES) -> None:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._handles = [os.open(path, flags, 0o600) for path in files]
        fcntl.flock(self._handles[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._limit_bytes, self._turn, self._written = limit_bytes, 0, 0

    def append(self, text: str) -> None:
        """Write one line."""
        line = text.encode() + b"\n"
        if self._written and self._written + len(line) > self._limit_bytes:
            self._turn, self._written = 1 - self._turn, 0
            os.ftruncate(self._handles[self._turn], 0)
        self._written += len(line)
        while line:
            line = line[os.write(self._handles[self._turn], line) :]

    def close(self) -> None:
        """Close the files, and with that give back the lock."""
        for handle in self._handles:
            os.close(handle)
        self._handles = []
