"""What attempts told that nobody has asked for: read from their folder after their supervisor has died."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from worker.contract.messages import Entry
from worker.contract.reports import attempt_folder, rank_files, supervisor_files

__all__ = ["ReportStore"]


class ReportStore:
    """Folders of reports below ``root``, one a job; on several machines they must be shared to be of use."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, job_id: str) -> Path:
        """Return the folder of a job."""
        return self._root / job_id

    def alive(self, job_id: str, attempt: int, num_ranks: int) -> tuple[str, ...]:
        """Name the processes of an attempt that still hold their files on this machine: they may tell more."""
        folder = attempt_folder(self.folder(job_id), attempt)
        tellers = {f"rank {rank}": rank_files(folder, rank) for rank in range(num_ranks)}
        tellers["the supervisor"] = supervisor_files(folder)
        return tuple(f"process of {name}" for name, files in tellers.items() if _is_locked(files[0]))

    def untold(
        self, job_id: str, attempt: int, num_ranks: int, *, after: int, numbers: Mapping[int, int]
    ) -> tuple[Entry, ...]:
        """Return what was told and never stored, in order, the end of the attempt last.

        Args:
            after: the last number of the supervisor's outbox that was stored; what is returned is numbered from there.
            numbers: by rank, the last of its own numbers that was stored.
        """
        folder = attempt_folder(self.folder(job_id), attempt)
        found = [entry for entry in _entries(supervisor_files(folder)) if entry.seq > after]
        for rank in range(num_ranks):
            found += (
                entry for entry in _entries(rank_files(folder, rank)) if (entry.number or 0) > numbers.get(rank, 0)
            )
        found.sort(key=lambda entry: (entry.body.kind == "end", entry.body.at, entry.number or 0))
        return tuple(entry.model_copy(update={"seq": after + place}) for place, entry in enumerate(found, 1))

    def remove(self, job_id: str, attempt: int | None = None) -> None:
        """Remove what is kept of an attempt, or of a whole job."""
        folder = self.folder(job_id)
        shutil.rmtree(folder if attempt is None else attempt_folder(folder, attempt), ignore_errors=True)
        if attempt is not None and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never made, or of another machine
        return False
    return False


def _entries(files: tuple[Path, Path]) -> Iterator[Entry]:
    for path in files:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            continue
        for line in lines:
            try:
                yield Entry.model_validate_json(line)
            except ValidationError:  # the last one may have been cut off in its middle
                continue
