"""What the client asks about the output of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TypeVar

from pydantic import BaseModel

from orchestrator import resources as r

__all__ = ["LogCalls", "StreamEnd"]

M = TypeVar("M", bound=BaseModel)


class StreamEnd(BaseModel):
    """Why a stream ended: the job's end, or ``server_stopping``."""

    reason: str | None = None
    state: str | None = None
    message: str = ""


class LogCalls(ABC):
    """The part of :class:`~orchestrator.client.Client` about logs."""

    def logs(
        self,
        job_id: str,
        *,
        after: str | None = None,
        attempt: int | None = None,
        rank: int | None = None,
        stream: str | None = None,
    ) -> r.LogPage:
        """Return lines that follow a cursor."""
        filters = {"after": after, "attempt": attempt, "rank": rank, "stream": stream}
        params = {name: str(value) for name, value in filters.items() if value is not None}
        return self._ask(r.LogPage, "GET", f"/v1/jobs/{job_id}/logs", params=params)

    def stream_logs(
        self,
        job_id: str,
        *,
        after: str | None = None,
        attempt: int | None = None,
        rank: int | None = None,
        stream: str | None = None,
    ) -> Iterator[r.LogPage | StreamEnd]:
        """Yield lines as they come, over all attempts; the last item says why there are no more."""
        filters = {"attempt": attempt, "rank": rank, "stream": stream}
        params = {name: str(value) for name, value in filters.items() if value is not None}
        last = {} if after is None else {"Last-Event-ID": after}
        for kind, data in self._stream(f"/v1/jobs/{job_id}/logs", last, params):
            yield StreamEnd.model_validate_json(data) if kind == "end" else r.LogPage.model_validate_json(data)

    @abstractmethod
    def _stream(
        self, path: str, headers: Mapping[str, str], params: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]: ...

    @abstractmethod
    def _ask(
        self,
        kind: type[M],
        method: str,
        path: str,
        *,
        content: str | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> M: ...
