"""What the client reads of events and logs, in pages and as streams."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from orchestrator import resources as r
from orchestrator._client_base import Caller

__all__ = ["StreamCalls", "StreamEnd"]


class StreamEnd(BaseModel):
    """Why a stream of events ended: the job's end, or ``server_stopping``."""

    reason: str | None = None
    state: str | None = None
    message: str = ""


class StreamCalls(Caller):
    """The part of :class:`~orchestrator.client.Client` that reads events and logs."""

    def events(self, job_id: str, *, after: int = 0) -> r.EventPage:
        """Return the events that follow one."""
        return self._ask(r.EventPage, "GET", f"/v1/jobs/{job_id}/events", params={"after": str(after)})

    def stream(self, job_id: str, *, after: int = 0) -> Iterator[r.EventResource | StreamEnd]:
        """Yield events as they come; the last item says why there are no more."""
        for kind, data in self._stream(f"/v1/jobs/{job_id}/events", {"Last-Event-ID": str(after)}, {}):
            yield StreamEnd.model_validate_json(data) if kind == "end" else r.EventResource.model_validate_json(data)

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
