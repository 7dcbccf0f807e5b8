"""Where the output of a rank lies: one file a stream in the folder of its attempt, beside it what was not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args

__all__ = ["STREAMS", "LogStream", "attempt_folder", "done_file", "dropped_file", "log_file"]

LogStream = Literal["stdout", "stderr"]
STREAMS: Final[tuple[LogStream, ...]] = get_args(LogStream)


def attempt_folder(directory: Path, attempt: int) -> Path:
    """Return the folder of an attempt in a job's folder of logs."""
    return directory / str(attempt)


def log_file(folder: Path, rank: int, stream: LogStream) -> Path:
    """Return the file that holds the bytes of a rank's stream, as they came."""
    return folder / f"{rank}.{stream}"


def dropped_file(folder: Path, rank: int, stream: LogStream) -> Path:
    """Return the file that says, as a decimal number, how many bytes of a stream were not kept."""
    return folder / f"{rank}.{stream}.dropped"


def done_file(folder: Path, rank: int) -> Path:
    """Return the file whose presence says that nothing more will come of a rank."""
    return folder / f"{rank}.done"
