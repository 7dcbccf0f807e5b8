"""Where what an attempt tells is kept on disk: two files for each rank and two for the supervisor, in its folder.

Each line is an :class:`~worker.contract.messages.Entry` as JSON. A teller writes to one file until it is full and then
begins the other one anew. It holds a lock (``flock``) on the first for as long as its process lives.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["attempt_folder", "rank_files", "supervisor_files"]


def attempt_folder(directory: Path, attempt: int) -> Path:
    """Return the folder of an attempt in a job's folder of reports."""
    return directory / str(attempt)


def rank_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the files of a rank, whose entries carry ``rank`` and ``number``."""
    return folder / f"{rank}.a.jsonl", folder / f"{rank}.b.jsonl"


def supervisor_files(folder: Path) -> tuple[Path, Path]:
    """Return the files of the supervisor: its own entries, with the numbers of its outbox."""
    return folder / "supervisor.a.jsonl", folder / "supervisor.b.jsonl"
