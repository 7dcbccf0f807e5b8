"""Sending this process's stdout and stderr to files, whatever writes to them: Python, C++ or a dying interpreter."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from worker import log_pump
from worker.contract.logs import attempt_folder

__all__ = ["capture_output"]


def capture_output(directory: Path, attempt: int, rank: int, quota_bytes: int) -> None:
    """From now on, everything written to file descriptors 1 and 2 goes to the log files of a rank.

    Args:
        directory: the job's folder of logs.
        quota_bytes: of each stream; what is above it is dropped and counted.

    Raises:
        OSError: the folder cannot be made or written to; nothing has changed then.
    """
    folder = attempt_folder(directory, attempt)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    probe = folder / f".{rank}.probe"
    probe.touch()
    probe.unlink()
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    try:
        words = [sys.executable, "-I", "-S", log_pump.__file__, folder, rank, quota_bytes, out_read, err_read]
        subprocess.run(
            [str(word) for word in words], pass_fds=(out_read, err_read), check=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(out_write, 1)
        os.dup2(err_write, 2)
    finally:
        for fd in (out_read, out_write, err_read, err_write):
            os.close(fd)
    sys.stdout, sys.stderr = _text(1), _text(2)


def _text(fd: int) -> io.TextIOWrapper:
    # Unbuffered, as "python -u" does it: what was printed before a crash is on its way to disk.
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(
        raw,
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )
