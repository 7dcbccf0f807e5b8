"""Planning, in a process that may import torch: this one must not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from pydantic import ValidationError

from orchestrator.errors import ChildFailed, LauncherUnavailable, PlannerFailed, PlanRefusedProblem, StartFailed
from orchestrator.line_process import LineProcess
from worker.contract.kernels import KernelAvailability
from worker.contract.plan import PlanReport
from worker.contract.planning import PlanAnswer, PlanRequest
from worker.contract.spec import JobSpec

__all__ = ["PLANNER_COMMAND", "EntryPlanner", "Planner", "ProcessPlanner"]

_log = logging.getLogger(__name__)
_MAX_REASON = 500
"""Characters of a failure that go into an answer or onto a job; the log has all of it."""
_NICENESS = 5
"""Of the planning process: with as many submissions as there may be, their answers come before their plans. A training
that takes all cores still leaves it a quarter of one."""
PLANNER_COMMAND = (sys.executable, "-m", "worker", "plan", "--serve")


class Planner(Protocol):
    """Makes plans. Calls may be long, and come from several threads."""

    def plan(self, spec: JobSpec, *, chip: str | None = None) -> PlanReport:
        """Return the plan of ``spec``, with its predicted cost on ``chip`` (default: the planner's own, if known).

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


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON else line[: _MAX_REASON - 3] + "..."


class _AnswerReader:
    """The two questions in terms of one exchange of texts."""

    def _ask(self, request: str) -> str:
        raise NotImplementedError

    def plan(self, spec: JobSpec, *, chip: str | None = None) -> PlanReport:
        answer = self._answer(PlanRequest(spec_json=spec.model_dump_json(), chip=chip))
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
            raise PlannerFailed(f"the planner's answer breaks the contract: {_one_line(str(error))}") from None
        if answer.failure is not None:
            _log.error("the planner failed: %s\n%s", answer.failure, answer.failure.traceback)
            raise PlannerFailed(f"the planner failed: {_one_line(str(answer.failure))}")
        return answer


class EntryPlanner(_AnswerReader):
    """Plans where the launcher runs entry points: for a control plane on a machine without torch."""

    def __init__(self, ask: Callable[[str], str], close: Callable[[], None] = lambda: None) -> None:
        self._send, self._close = ask, close

    def _ask(self, request: str) -> str:
        try:
            return self._send(request)
        except (LauncherUnavailable, StartFailed) as error:
            raise PlannerFailed(f"planning in the cluster failed: {_one_line(str(error))}") from None

    def close(self) -> None:
        """Close what asks."""
        self._close()


class ProcessPlanner(_AnswerReader):
    """Plans in a warm child process."""

    def __init__(self, command: Sequence[str] = PLANNER_COMMAND, *, timeout_s: float = 300.0) -> None:
        self._child = LineProcess(command, what="planner's process", niceness=_NICENESS)
        self._timeout_s = timeout_s

    def _ask(self, request: str) -> str:
        try:
            return self._child.ask(request, self._timeout_s)
        except ChildFailed as error:
            raise PlannerFailed(error.detail) from None

    def close(self) -> None:
        """End the child; a request that is in progress fails."""
        self._child.close()
