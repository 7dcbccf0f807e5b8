"""Planning, in a process that may import torch: this one must not.

The child is started once and kept warm; requests go through it one at a time as lines of JSON. A child that dies or is
silent for too long is ended, and the next request starts another.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Protocol

from pydantic import ValidationError

from orchestrator.errors import PlannerFailed, PlanRefusedProblem
from worker.contract.kernels import KernelAvailability
from worker.contract.plan import PlanReport
from worker.contract.planning import PlanAnswer, PlanRequest
from worker.contract.spec import JobSpec

__all__ = ["PLANNER_COMMAND", "EntryPlanner", "Planner", "ProcessPlanner"]

PLANNER_COMMAND = (sys.executable, "-m", "worker", "plan", "--serve")


class Planner(Protocol):
    """Makes plans. Calls may be long, and come from several threads."""

    def plan(self, spec: JobSpec) -> PlanReport:
        """Return the plan of ``spec``.

        Raises:
            PlanRefusedProblem: no plan can be made of it.
            PlannerFailed: the planner itself failed, which says nothing about the spec.
        """
        ...

    def kernels(self) -> tuple[KernelAvailability, ...]:
        """Return what the planner's machine can run.

        Raises:
            PlannerFailed: the planner itself failed.
        """
        ...

    def close(self) -> None:
        """End what the planner started."""
        ...


class _AnswerReader:
    """The two questions in terms of one exchange of texts."""

    def _ask(self, request: str) -> str:
        raise NotImplementedError

    def plan(self, spec: JobSpec) -> PlanReport:
        answer = self._answer(PlanRequest(spec_json=spec.model_dump_json()))
        if answer.errors:
            raise PlanRefusedProblem(f"no plan can be made of job {spec.name}", answer.errors)
        if answer.plan is None:
            raise PlannerFailed("the planner answered without a plan and without a reason")
        return answer.plan

    def kernels(self) -> tuple[KernelAvailability, ...]:
        return self._answer(PlanRequest()).kernels or ()

    def _answer(self, request: PlanRequest) -> PlanAnswer:
        text = self._ask(request.model_dump_json())
        try:
            answer = PlanAnswer.model_validate_json(text)
        except ValidationError as error:
            raise PlannerFailed(f"the planner's answer breaks the contract: {error}") from None
        if answer.failure is not None:
            raise PlannerFailed(f"the planner failed: {answer.failure}\n{answer.failure.traceback}".rstrip())
        return answer


class EntryPlanner(_AnswerReader):
    """Plans where the launcher runs entry points: for a control plane on a machine without torch."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._send = ask

    def _ask(self, request: str) -> str:
        return self._send(request)

    def close(self) -> None:
        """Nothing was started."""


class ProcessPlanner(_AnswerReader):
    """Plans in a warm child process."""

    def __init__(self, command: Sequence[str] = PLANNER_COMMAND, *, timeout_s: float = 300.0) -> None:
        self._command, self._timeout_s = tuple(command), timeout_s
        self._turn = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def _ask(self, request: str) -> str:
        with self._turn:
            child = self._running_child()
            try:
                assert child.stdin is not None
                child.stdin.write(request + "\n")
                child.stdin.flush()
                answer = self._answers.get(timeout=self._timeout_s)
            except queue.Empty:
                self._end_child()
                raise PlannerFailed(f"the planner did not answer within {self._timeout_s:g} s and was ended") from None
            except OSError:
                answer = None
            if answer is None:
                code = self._end_child()
                raise PlannerFailed(
                    f"the planner's process ended with code {code}; the server's log has its last words"
                )
            return answer

    def _running_child(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child()
        try:
            child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise PlannerFailed(f"the planner {self._command[0]!r} cannot be started: {error}") from None
        self._child, self._answers = child, queue.SimpleQueue()
        assert child.stdout is not None
        reader = threading.Thread(target=_read_lines, args=(child.stdout, self._answers), daemon=True)
        reader.start()
        return child

    def _end_child(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(5.0)
            except subprocess.TimeoutExpired:
                child.kill()
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        return child.wait()

    def close(self) -> None:
        """End the child; a request that is in progress fails."""
        child = self._child
        if child is not None and child.poll() is None:
            child.terminate()
        with self._turn:
            self._end_child()


def _read_lines(stream: IO[str], answers: queue.SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            if line.lstrip().startswith("{"):  # a library may print to standard output: that is no answer
                answers.put(line)
    answers.put(None)
