"""Documents about what ranks wrote."""

from __future__ import annotations

from orchestrator._resource import Resource
from worker.contract.logs import LogStream

__all__ = ["LogDropped", "LogLine", "LogPage"]


class LogLine(Resource):
    """A line that a rank wrote, and the bytes of its file that it was."""

    attempt: int
    rank: int
    stream: LogStream
    offset: int
    """Of its first byte in the stream of this rank and attempt."""
    next_offset: int
    text: str
    """Without the line break; bytes that are no UTF-8 are U+FFFD."""
    partial: bool
    """The line goes on in the next one: it was too long for one."""


class LogDropped(Resource):
    """Output above a stream's quota."""

    rank: int
    stream: LogStream
    dropped_bytes: int


class LogPage(Resource):
    """Lines of one attempt, by rank and stream; ``next_after`` is what to ask for next."""

    lines: tuple[LogLine, ...]
    next_after: str
    dropped: tuple[LogDropped, ...] = ()
    """Of the streams that lost anything so far."""
    drained: bool
    """Nothing more will come of this attempt."""
