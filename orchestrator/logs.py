"""Reading the output of jobs from disk: lines with the bytes that they were, and cursors that lose nothing."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import InvalidInput
from worker.contract.errors import FieldError
from worker.contract.logs import STREAMS, LogStream, attempt_folder, done_file, dropped_file, log_file

__all__ = ["MAX_FILES", "MAX_LINE_BYTES", "Cursor", "Line", "LogStore", "Part", "Selection", "split_lines"]

MAX_LINE_BYTES = 16_384
"""A longer line comes in parts."""
MAX_FILES = 256
"""Streams that one reader may follow at once."""
_SETTLED_S = 2.0
"""A file whose pump died is complete when it has not grown for so long after the attempt's end."""
_BREAK = re.compile(rb"\r\n|\n|\r")
_CURSOR = re.compile(r"\d{1,9}(;\d{1,9}\.(stdout|stderr)=\d{1,18}(,\d{1,9}\.(stdout|stderr)=\d{1,18})*)?")
Key = tuple[int, LogStream]
"""Rank and stream."""


@dataclass(frozen=True, slots=True)
class Line:
    """Text and the bytes of the file that it was: from ``offset`` up to ``next_offset``, line break included."""

    offset: int
    next_offset: int
    text: str
    partial: bool
    """The line goes on in the next one."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which output: of one rank or of all, of one stream or of both."""

    rank: int | None = None
    stream: LogStream | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a reader is: the attempt, and in each of its files the byte to go on at; 0 where none is named."""

    attempt: int
    offsets: Mapping[Key, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{rank}.{stream}={offset}" for (rank, stream), offset in sorted(self.offsets.items()) if offset]
        return f"{self.attempt}" + (f";{','.join(parts)}" if parts else "")

    @classmethod
    def parse(cls, text: str, where: str) -> Cursor:
        """Read what ``str`` wrote.

        Raises:
            InvalidInput: it is something else; ``where`` is the pointer of the error.
        """
        if len(text) > 65_536 or not _CURSOR.fullmatch(text):
            shown = text if len(text) <= 40 else text[:40] + "..."
            message = f"found {shown!r}, expected a cursor that this service gave out"
            raise InvalidInput(
                "the cursor cannot be read", (FieldError(pointer=where, code="unreadable", message=message),)
            )
        attempt, _, rest = text.partition(";")
        offsets: dict[Key, int] = {}
        for part in filter(None, rest.split(",")):
            name, _, offset = part.partition("=")
            rank, _, stream = name.partition(".")
            offsets[int(rank), "stderr" if stream == "stderr" else "stdout"] = int(offset)
        return cls(int(attempt), offsets)


@dataclass(frozen=True, slots=True)
class Part:
    """New lines of one attempt, and where to go on."""

    lines: tuple[tuple[Key, Line], ...]
    cursor: Cursor
    dropped: Mapping[Key, int]
    """Bytes that were not kept, of the files that lost any."""
    drained: bool
    """Nothing more will come of this attempt."""


class LogStore:
    """The logs of all jobs, a folder each under ``directory``. Methods read files: call them from a thread."""

    def __init__(self, directory: Path, quota_bytes: int = 32 << 20) -> None:
        self.directory, self.quota_bytes = directory, quota_bytes

    def folder(self, job_id: str) -> Path:
        """Return the folder of a job, which workers are told."""
        return self.directory / job_id

    def remove(self, job_id: str) -> None:
        """Remove all output of a job."""
        shutil.rmtree(self.folder(job_id), ignore_errors=True)

    def version(self, job_id: str) -> tuple[int, int]:
        """Return the number of files and of bytes of a job, to see whether there are more."""
        sizes = [_size(path) for path in self.folder(job_id).glob("*/*")]
        return len(sizes), sum(sizes)

    def read(self, job_id: str, cursor: Cursor, wanted: Selection, *, limit_bytes: int, ended: bool) -> Part:
        """Return the lines of an attempt that follow ``cursor``, about ``limit_bytes`` of them.

        Args:
            ended: the attempt is over, so that an unfinished line will stay so.

        Raises:
            InvalidInput: more files are asked for than one reader may follow.
        """
        folder = attempt_folder(self.folder(job_id), cursor.attempt)
        keys = self._keys(folder, wanted)
        offsets, lines, left = dict(cursor.offsets), list[tuple[Key, Line]](), limit_bytes
        drained = ended
        for rank, stream in keys:
            path, start = log_file(folder, rank, stream), offsets.get((rank, stream), 0)
            complete = done_file(folder, rank).exists() or (ended and _settled(path))
            found = _read(path, start, max(0, left))
            at_end = start + len(found) >= _size(path)
            for line in split_lines(found, start, final=complete and at_end):
                lines.append(((rank, stream), line))
                offsets[rank, stream] = line.next_offset
            left -= len(found)
            drained &= complete and offsets.get((rank, stream), 0) >= _size(path)
        dropped = {key: number for key in keys if (number := _dropped(folder, *key))}
        return Part(tuple(lines), Cursor(cursor.attempt, offsets), dropped, drained)

    def _keys(self, folder: Path, wanted: Selection) -> list[Key]:
        streams = STREAMS if wanted.stream is None else (wanted.stream,)
        names = {path.name for path in folder.glob("*.std???")} if folder.is_dir() else set()
        ranks = {int(name.partition(".")[0]) for name in names if name.partition(".")[0].isdigit()}
        if wanted.rank is not None:
            ranks &= {wanted.rank}
        keys = [(rank, stream) for rank in sorted(ranks) for stream in streams if f"{rank}.{stream}" in names]
        if len(keys) > MAX_FILES:
            message = f"{len(keys)} streams were asked for; {MAX_FILES} can be read at once"
            error = FieldError(pointer="/query/rank", code="too_many", message=message, suggestion="Name a rank.")
            raise InvalidInput("that is too much to read at once", (error,))
        return keys


def _read(path: Path, offset: int, limit_bytes: int) -> bytes:
    if not limit_bytes:
        return b""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        return file.read(max(limit_bytes, MAX_LINE_BYTES + 2))
    return b""


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _settled(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > _SETTLED_S
    return True


def _dropped(folder: Path, rank: int, stream: LogStream) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(dropped_file(folder, rank, stream).read_text())
    return 0


def split_lines(data: bytes, offset: int, *, final: bool) -> Iterator[Line]:
    r"""Yield the lines of ``data``, which lies at ``offset`` of its file. A line ends at ``\n``, ``\r\n`` or ``\r``.

    What is not finished is left for later, unless it is ``final`` or longer than :data:`MAX_LINE_BYTES`; no character
    is cut in two, and bytes that are no UTF-8 become U+FFFD.
    """
    begin = 0
    while begin < len(data):
        found = _BREAK.search(data, begin, begin + MAX_LINE_BYTES + 1)
        if found is not None and (found.end() < len(data) or found.group() != b"\r" or final):
            stop, end, partial = found.start(), found.end(), False
        elif found is None and len(data) - begin > MAX_LINE_BYTES:
            stop = end = begin + _whole_characters(data[begin : begin + MAX_LINE_BYTES])
            partial = True
        elif final and found is None:
            stop, end, partial = len(data), len(data), False
        else:
            return  # unfinished, or a carriage return of which nobody knows yet whether a line feed follows
        yield Line(offset + begin, offset + end, data[begin:stop].decode("utf-8", "replace"), partial)
        begin = end


def _whole_characters(data: bytes) -> int:
    """Return how many bytes of ``data`` to take so that no UTF-8 character is cut in two."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # a first byte: of a character of so many bytes
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(data) - back if length > back and len(data) > back else len(data)
    return len(data)
