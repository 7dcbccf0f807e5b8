"""A bound on how much a request may send."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.errors import PROBLEM_TYPE, Problem, TooLarge

__all__ = ["BodyLimitMiddleware"]


class BodyLimitMiddleware:
    """Refuses bodies of more than ``max_bytes``: by their declared length at once, else while they are read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            problem = Problem.of(self._error(declared), instance=scope["path"])
            answer = Response(problem.model_dump_json(), status_code=problem.status, media_type=PROBLEM_TYPE)
            await answer(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._error(f"more than {self._max_bytes}")
            return message

        await self._app(scope, counted, send)

    def _error(self, found: str) -> TooLarge:
        return TooLarge(f"the body has {found} bytes; {self._max_bytes} are allowed")
