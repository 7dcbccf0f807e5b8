"""Bounds on how much a request may send, and how slowly."""

from __future__ import annotations

import anyio
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.errors import PROBLEM_TYPE, Problem, RequestTimeout, TooLarge

__all__ = ["BodyLimitMiddleware"]


class BodyLimitMiddleware:
    """Refuses bodies of more than ``max_bytes``: by their declared length at once, else while they are read.

    A body that has not come whole within ``timeout_s`` is refused too.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

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
        seen, whole = 0, False
        deadline = anyio.current_time() + self._timeout_s

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:
                return await receive()  # what comes now is that the client has left
            try:
                with anyio.fail_after(deadline - anyio.current_time()):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout(f"the body had not come whole after {self._timeout_s:g} s") from None
            whole = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._error(f"more than {self._max_bytes}")
            return message

        await self._app(scope, counted, send)

    def _error(self, found: str) -> TooLarge:
        return TooLarge(f"the body has {found} bytes; {self._max_bytes} are allowed")
