"""The launcher behind a pipe: this side speaks to a child process that speaks to the cluster.

Whatever happens to a process that is connected to the cluster then happens to the child, which is started anew.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Literal, Protocol

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from orchestrator.call_process import CallProcess
from orchestrator.errors import ChildFailed, LauncherUnavailable, ServiceError, StartFailed, SupervisorGone
from orchestrator.launcher_api import AttemptRef, Capacity, Launcher
from worker.contract.gpus import GpuLook
from worker.contract.kernels import KernelPolicy
from worker.contract.messages import AttemptStart, PollBatch, StopRequest

__all__ = ["EntryLauncher", "ProcessLauncher", "serve_calls"]

_CALL_S, _LOOK_S, _START_S, _PLAN_S = 15.0, 30.0, 75.0, 320.0
"""Time limits of this side; the child's own are shorter, and its answer says more than its end."""
_MAX_CALLS = 16
_ERRORS: dict[str, type[ServiceError]] = {
    kind.code: kind for kind in (LauncherUnavailable, StartFailed, SupervisorGone)
}
_CAPACITY, _NAMES = TypeAdapter(Capacity), TypeAdapter(tuple[str, ...])
_LOOKS = TypeAdapter(tuple[GpuLook, ...])
Method = Literal[
    "capacity", "gpu_looks", "start_attempt", "run_entry", "poll", "set_kernels", "stop", "leave", "kill", "remains"
]  # fmt: skip


class EntryLauncher(Launcher, Protocol):
    """A launcher that can also plan in the cluster."""

    def run_entry(self, request: str) -> str:
        """Hand a request to the planner's entry point and return its answer."""
        ...


class _Call(BaseModel):
    model_config = ConfigDict(frozen=True)

    method: Method
    ref: AttemptRef | None = None
    cursor: int = 0
    limit: int = 0
    body: str = ""


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True)

    result: str = ""
    error: str | None = None
    """Code of an error of the launcher."""
    detail: str = ""


class ProcessLauncher:
    """A launcher whose work is done in a child process; ``environment`` is added to the child's."""

    def __init__(self, address: str, environment: Mapping[str, str] | None = None) -> None:
        what = "process that speaks to Ray"
        self._child = CallProcess(_command(address), what=what, environment=environment, polite_s=2.0)

    def move(self, address: str) -> None:
        """Speak to another cluster from now on; calls that are in progress fail as unavailable."""
        self._child.use(_command(address))

    def capacity(self) -> Capacity:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        return _CAPACITY.validate_json(self._ask(_Call(method="capacity")))

    def gpu_looks(self) -> tuple[GpuLook, ...]:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        return _LOOKS.validate_json(self._ask(_Call(method="gpu_looks"), _LOOK_S))

    def start_attempt(self, start: AttemptStart) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        self._ask(_Call(method="start_attempt", body=start.model_dump_json()), _START_S)

    def run_entry(self, request: str) -> str:
        """See :class:`EntryLauncher`."""
        return self._ask(_Call(method="run_entry", body=request), _PLAN_S)

    def poll(self, ref: AttemptRef, cursor: int, limit: int) -> PollBatch:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        text = self._ask(_Call(method="poll", ref=ref, cursor=cursor, limit=limit))
        return PollBatch.model_validate_json(text)

    def set_kernels(self, ref: AttemptRef, policy: KernelPolicy) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        self._ask(_Call(method="set_kernels", ref=ref, body=policy.model_dump_json()))

    def stop(self, ref: AttemptRef, request: StopRequest) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        self._ask(_Call(method="stop", ref=ref, body=request.model_dump_json()))

    def leave(self, ref: AttemptRef) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        self._ask(_Call(method="leave", ref=ref))

    def kill(self, ref: AttemptRef) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        self._ask(_Call(method="kill", ref=ref))

    def remains(self, ref: AttemptRef) -> tuple[str, ...]:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        return _NAMES.validate_json(self._ask(_Call(method="remains", ref=ref)))

    def close(self) -> None:
        """End the child."""
        self._child.close()

    def _ask(self, call: _Call, timeout_s: float = _CALL_S) -> str:
        try:
            reply = _Reply.model_validate_json(self._child.ask(call.model_dump_json(), timeout_s))
        except ChildFailed as error:
            raise LauncherUnavailable(error.detail) from None
        except ValidationError as error:
            raise LauncherUnavailable(f"the process that speaks to Ray answered what cannot be read: {error}") from None
        if reply.error is not None:
            raise _ERRORS.get(reply.error, LauncherUnavailable)(reply.detail)
        return reply.result


def _command(address: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.launcher", address]


def serve_calls(launcher: EntryLauncher, requests: IO[str], answers: IO[str]) -> None:
    """Answer calls, one a line, until the input ends. Runs in the child.

    Calls run beside each other: one whose supervisor hangs holds up no other.
    """
    lock = threading.Lock()

    def answer(line: str) -> None:
        number, _, text = line.partition(" ")
        reply = _reply_to(launcher, text)
        with lock, contextlib.suppress(OSError):  # the parent may be gone
            answers.write(f"{number} {reply.model_dump_json()}\n")
            answers.flush()

    pool = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="call")
    for line in requests:
        pool.submit(answer, line)
    pool.shutdown(wait=False, cancel_futures=True)


def _reply_to(launcher: EntryLauncher, text: str) -> _Reply:
    try:
        return _Reply(result=_dispatch(launcher, _Call.model_validate_json(text)))
    except ServiceError as error:
        return _Reply(error=error.code, detail=error.detail)
    except Exception as error:  # the child must answer, or its parent takes it for hung
        return _Reply(error=LauncherUnavailable.code, detail=f"{type(error).__name__}: {error}")


def _dispatch(launcher: EntryLauncher, call: _Call) -> str:
    ref = call.ref or AttemptRef("", 0, "")
    answers: dict[str, Callable[[], str | None]] = {
        "capacity": lambda: _CAPACITY.dump_json(launcher.capacity()).decode(),
        "gpu_looks": lambda: _LOOKS.dump_json(launcher.gpu_looks()).decode(),
        "start_attempt": lambda: launcher.start_attempt(AttemptStart.model_validate_json(call.body)),
        "run_entry": lambda: launcher.run_entry(call.body),
        "poll": lambda: launcher.poll(ref, call.cursor, call.limit).model_dump_json(),
        "set_kernels": lambda: launcher.set_kernels(ref, KernelPolicy.model_validate_json(call.body)),
        "stop": lambda: launcher.stop(ref, StopRequest.model_validate_json(call.body)),
        "leave": lambda: launcher.leave(ref),
        "kill": lambda: launcher.kill(ref),
        "remains": lambda: _NAMES.dump_json(launcher.remains(ref)).decode(),
    }
    return answers[call.method]() or ""
