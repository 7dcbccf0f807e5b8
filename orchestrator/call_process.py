"""A warm child process that answers many requests at once, in any order.

A request and its answer begin with the same number; what follows is JSON on the rest of the line.
"""

from __future__ import annotations

import itertools
import queue
import threading
from typing import IO

from orchestrator.errors import ChildFailed
from orchestrator.line_process import LineProcess

__all__ = ["CallProcess"]

Answer = queue.SimpleQueue[str | None]


class _Desk:
    """Who waits for which answer of one child; after its end everybody is told so, and nobody may wait any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Answer] = {}
        self._closed = False

    def wait_for(self, number: int) -> Answer:
        answer: Answer = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                answer.put(None)
            else:
                self._waiting[number] = answer
        return answer

    def forget(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)

    def read_from(self, stream: IO[str]) -> None:
        """Hand out answers until the stream ends. What a library prints there is no answer."""
        with stream:
            for line in stream:
                number, _, text = line.partition(" ")
                with self._lock:
                    answer = self._waiting.get(int(number)) if number.isascii() and number.isdigit() else None
                if answer is not None and text.startswith("{"):
                    answer.put(text)
        with self._lock:
            self._closed = True
            for answer in self._waiting.values():
                answer.put(None)


class CallProcess(LineProcess):
    """As :class:`LineProcess`, with many requests on their way; one that gets no answer in time ends the child."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._numbers = itertools.count(1)
        self._desk = _Desk()

    def ask(self, request: str, timeout_s: float) -> str:
        """As in :class:`LineProcess`, from any number of threads."""
        number = next(self._numbers)
        with self._turn:
            child = self._running_child()
            desk = self._desk
            answer = desk.wait_for(number)
            assert child.stdin is not None
            try:
                child.stdin.write(f"{number} {request}\n")
                child.stdin.flush()
            except OSError:
                answer.put(None)
        try:
            text = answer.get(timeout=timeout_s)
        except queue.Empty:
            self._end_if(child)
            raise ChildFailed(f"the {self._what} did not answer within {timeout_s:g} s and was ended") from None
        finally:
            desk.forget(number)
        if text is None:
            code = self._end_if(child)
            raise ChildFailed(f"the {self._what} ended with code {code}; the server's log has its last words")
        return text

    def _listen(self, stream: IO[str]) -> None:
        self._desk = _Desk()
        threading.Thread(target=self._desk.read_from, args=(stream,), daemon=True).start()
