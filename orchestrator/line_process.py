"""A warm child process that answers one line of JSON for each line it reads.

It is started when it is first asked and again after it died. Requests go through it one at a time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from orchestrator.errors import ChildFailed
from orchestrator.settings import child_environment

__all__ = ["LineProcess"]

_TERMINATE_S = 3.0


class LineProcess:
    """The child that ``command`` starts.

    ``what`` names it in errors, ``polite_s`` is how long it may take to end, and ``niceness`` how far it stands back
    for others where they want the same cores.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        what: str,
        environment: Mapping[str, str] | None = None,
        polite_s: float = 0.5,
        niceness: int = 0,
    ) -> None:
        self._command, self._what, self._polite_s, self._niceness = tuple(command), what, polite_s, niceness
        self._environment = dict(environment or {})
        self._turn = threading.Lock()
        self._closed = False
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask(self, request: str, timeout_s: float) -> str:
        """Return the answer to one line.

        Raises:
            ChildFailed: the child cannot be started, died, or did not answer in time (and was ended).
        """
        with self._turn:
            child = self._running_child()
            assert child.stdin is not None
            try:
                child.stdin.write(request + "\n")
                child.stdin.flush()
                answer = self._answers.get(timeout=timeout_s)
            except queue.Empty:
                self._end_child(polite_s=0.0)
                raise ChildFailed(f"the {self._what} did not answer within {timeout_s:g} s and was ended") from None
            except OSError:
                answer = None
            if answer is None:
                code = self._end_child(polite_s=0.0)
                raise ChildFailed(f"the {self._what} ended with code {code}; the server's log has its last words")
            return answer

    def use(self, command: Sequence[str]) -> None:
        """End the child; the next one is started by ``command``."""
        with self._turn:
            self._command = tuple(command)
            self._end_child(polite_s=0.0)

    def close(self) -> None:
        """End the child; a request that is in progress fails."""
        self._closed = True
        child = self._child
        if not self._turn.acquire(blocking=False):
            if child is not None:
                child.terminate()
            self._turn.acquire()
        try:
            self._end_child(polite_s=self._polite_s)
        finally:
            self._turn.release()

    def _running_child(self) -> subprocess.Popen[str]:
        if self._closed:
            raise ChildFailed(f"the {self._what} was closed")
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child(polite_s=0.0)
        try:
            # A group of its own: Ctrl-C is for the server, which then ends its children in order.
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
                env=child_environment(self._environment),
            )
        except OSError as error:
            raise ChildFailed(f"the {self._what} ({self._command[0]!r}) cannot be started: {error}") from None
        self._child = child
        if self._niceness:
            # It has one thread yet, of which all others inherit. A system that forbids this is none to fail for.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, self._niceness)
        assert child.stdout is not None
        self._listen(child.stdout)
        return child

    def _listen(self, stream: IO[str]) -> None:
        """Begin to read what a new child answers."""
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(stream, self._answers), daemon=True).start()

    def _end_if(self, child: subprocess.Popen[str]) -> int | None:
        """End ``child``, unless another one has taken its place; return its exit code."""
        with self._turn:
            if self._child is child:
                return self._end_child(polite_s=0.0)
        return child.poll()

    def _end_child(self, *, polite_s: float) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()  # the end of its input is the polite way to ask
        for wait_s, next_step in ((polite_s, child.terminate), (_TERMINATE_S, child.kill)):
            try:
                return child.wait(wait_s)
            except subprocess.TimeoutExpired:
                next_step()
        return child.wait()


def _read_lines(stream: IO[str], answers: queue.SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            if line.startswith("{"):  # a library may print to standard output: that is no answer
                answers.put(line)
    answers.put(None)
