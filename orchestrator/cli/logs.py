"""Printing what ranks wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import typer

from orchestrator import resources as r
from orchestrator.cli import _console as c
from orchestrator.client import Client, StreamEnd

__all__ = ["Wanted", "printable", "show_logs"]

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?|\x1b.")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return ``text`` without what a terminal would obey: a job's output must not steer the operator's screen."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _ESCAPES.sub("", text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which lines to print; None is all."""

    attempt: int | None = None
    rank: int | None = None
    stream: str | None = None


def show_logs(client: Client, job_id: str, wanted: Wanted, *, following: bool, as_json: bool) -> None:
    """Print a job's lines, with ``following`` until the job has ended."""
    lost: dict[tuple[int, str], int] = {}
    seen = 0
    pages = _followed(client, job_id, wanted) if following else _all_pages(client, job_id, wanted)
    for page in pages:
        if isinstance(page, StreamEnd):
            c.errors.print(f"end: {page.state or ''} {page.reason or ''}", markup=False)
            break
        lost |= {(part.rank, part.stream): part.dropped_bytes for part in page.dropped}
        for line in page.lines:
            seen += 1
            mark = "!" if line.stream == "stderr" else " "
            shown = f"{line.rank:>3}{mark} {printable(line.text)}"
            typer.echo(line.model_dump_json() if as_json else shown, nl=as_json or not line.partial)
    for (rank, stream), number in lost.items():
        c.errors.print(f"rank {rank}: {number} bytes of {stream} are above its quota and were not kept", markup=False)
    if not seen and not as_json:
        c.errors.print(f"job {job_id} has written nothing yet", markup=False)


def _followed(client: Client, job_id: str, wanted: Wanted) -> Iterator[r.LogPage | StreamEnd]:
    return client.stream_logs(job_id, attempt=wanted.attempt, rank=wanted.rank, stream=wanted.stream)


def _all_pages(client: Client, job_id: str, wanted: Wanted) -> Iterator[r.LogPage]:
    after: str | None = None
    while True:
        page = client.logs(job_id, after=after, attempt=wanted.attempt, rank=wanted.rank, stream=wanted.stream)
        yield page
        if not page.lines:
            return
        after = page.next_after
