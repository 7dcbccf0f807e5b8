"""The actor of one rank: runs the training in a thread of its own and never raises a foreign exception."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

from worker.actors._sender import Sender, rank_journal
from worker.actors._stacks import offer_stacks
from worker.contract.errors import ErrorValue
from worker.contract.gpus import attempt_mark
from worker.contract.kernels import KernelPolicy
from worker.contract.messages import AttemptStart, Milestone, RankError
from worker.contract.spec import JobSpec
from worker.marks import mark_process
from worker.outcome import EndKind, RankEnd
from worker.watchdog import Beat

__all__ = ["RankActor"]


class RankActor:
    """One rank of an attempt. Torch is imported when it is first needed, so that a broken install is an answer."""

    def __init__(self, attempt_json: str, rank: int) -> None:
        self._attempt = AttemptStart.model_validate_json(attempt_json)
        self._rank = rank
        self._mailbox: Any = None
        self._store: Any = None
        self._place: Any = None
        mark_process(attempt_mark(self._attempt.job_id, self._attempt.attempt))
        self._log_problem = self._capture_output()

    def _capture_output(self) -> str:
        """Send this process's output to its log files; return why that is not possible, or nothing."""
        if not self._attempt.log_directory:
            return ""
        from worker.log_capture import capture_output

        attempt = self._attempt
        try:
            capture_output(Path(attempt.log_directory), attempt.attempt, self._rank, attempt.log_quota_bytes)
        except (OSError, subprocess.SubprocessError) as error:  # training is worth more than its output
            return f"the output of rank {self._rank} is not kept in {attempt.log_directory}: {error}"
        words = f"rank {self._rank} of attempt {attempt.attempt} of job {attempt.job_id}: process {os.getpid()}"
        print(f"{words} on {socket.gethostname()}", file=sys.stderr)
        return ""

    def hello(self) -> dict[str, str | int | float]:
        """Say where this rank runs.

        Returns:
            ``pid``, ``started`` (clock ticks since boot), ``node_id``, ``host`` and ``stacks`` (a descriptor).
        """
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "started": _start_ticks(os.getpid()),
            "node_id": context.get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "stacks": offer_stacks(),
        }

    def prepare(self, serve: bool) -> str:
        """Import what training needs; serve the store if asked to. Returns ``address``, or an ErrorValue as JSON."""
        try:
            from worker.control import Mailbox
            from worker.rendezvous import serve_store
            from worker.settings import read_settings
            from worker.train import train  # noqa: F401  (imports torch, transformers and the runtime)

            self._mailbox = Mailbox(self._attempt.kernels)
            if not serve:
                return ""
            host = ray.util.get_node_ip_address()
            self._store = serve_store(host, read_settings().join_timeout_s)
            return f"{host}:{self._store.port}"
        except BaseException as error:  # a broken install can raise anything
            return ErrorValue.from_exception(error, rank=self._rank).model_dump_json()

    def run(self, address: str, supervisor: Any) -> str:
        """Train to the end; returns a :class:`RankEnd` as JSON, whatever happens."""
        from worker.settings import read_settings

        journal, not_kept = rank_journal(self._attempt, self._rank)
        sender = Sender(supervisor, self._attempt.fence, read_settings().report_queue_limit, self._rank, journal)
        if self._log_problem:
            sender.put(Milestone(name="logs_off", at=time.time(), message=self._log_problem, rank=self._rank))
        if not_kept:
            sender.put(Milestone(name="reports_off", at=time.time(), message=not_kept, rank=self._rank))
        begun, seat = False, None
        try:
            seat = self._place = self._seat(address, sender)
            try:
                outcome = self.train(seat)
            finally:
                begun = seat.phase == "done"
            end = RankEnd(rank=self._rank, kind=EndKind(outcome), at=time.time())
        except Exception as error:  # a foreign exception may not survive pickling: it becomes a value here
            value = ErrorValue.from_exception(error, rank=self._rank)
            if seat is None or seat.told is not error:
                sender.put(RankError(at=time.time(), error=value))
            end = RankEnd(rank=self._rank, kind=EndKind.FAILED, at=time.time(), set_up=begun, error=value)
        sender.close()
        return end.model_dump_json()

    def train(self, seat: Any) -> str:
        """Train from a :class:`worker.train.Rank` to the end; returns the outcome."""
        from worker.train import train

        return train(seat).value

    def _seat(self, address: str, sender: Sender) -> Any:
        from worker import train
        from worker.device import decide_device, limit_threads
        from worker.rendezvous import connect_store
        from worker.settings import read_settings

        spec = JobSpec.model_validate_json(self._attempt.spec_json)
        settings = read_settings()
        limit_threads(spec)
        store = self._store or connect_store(address, settings.join_timeout_s)
        place = self._attempt.checkpoint_directory
        return train.Rank(
            spec, self._rank, decide_device(spec, 0), store, settings, self._mailbox, sender.put,
            plan_hash=self._attempt.plan_hash or None, attempt=self._attempt.attempt,
            checkpoint_directory=Path(place) if place else None,
        )  # fmt: skip

    def beat(self) -> str:
        """Say where this rank is: a :class:`Beat` as JSON. Loads nothing, and answers beside everything else."""
        progress, seat = sys.modules.get("dmuon_runtime.progress"), self._place
        if progress is None or seat is None:
            return Beat(phase="joining", phase_seconds=0.0).model_dump_json()
        at = progress.PROGRESS.look()
        return Beat(
            phase=at.phase if seat.phase in ("building", "training") else str(seat.phase), phase_seconds=at.seconds,
            step=seat.step, first_step=seat.steps_done == 0, marks=at.marks, waiting=at.waiting,
            waiting_seconds=at.waiting_seconds,
        ).model_dump_json()  # fmt: skip

    def set_kernels(self, policy_json: str) -> None:
        """Take a kernel policy; all ranks change at the step that rank 0 announces."""
        if self._mailbox is not None:
            self._mailbox.set_kernels(KernelPolicy.model_validate_json(policy_json))

    def stop(self) -> None:
        """Stop at the step that rank 0 announces."""
        if self._mailbox is not None:
            self._mailbox.stop()


def _start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot: with the pid, it names a process for good."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return int(file.read().rpartition(")")[2].split()[19])
    return 0
