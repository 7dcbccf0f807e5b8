"""The supervisor actor of an attempt: answers the control plane, takes the ranks' reports, and outlives both."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from pathlib import Path
from typing import ClassVar

import ray

from worker.actors.attempt import Attempt
from worker.actors.rank import RankActor
from worker.contract.kernels import KernelPolicy
from worker.contract.messages import AttemptStart, Entry, Milestone, StopRequest
from worker.contract.reports import attempt_folder, supervisor_files
from worker.journal import Journal
from worker.outbox import Outbox

__all__ = ["Supervisor", "WrongFence"]

_log = logging.getLogger(__name__)


class WrongFence(ValueError):
    """A call carried the token of another attempt; it changed nothing."""

    code = "wrong_fence"

    def __init__(self, call: str) -> None:
        self.call = call
        super().__init__(call)

    def __str__(self) -> str:
        return f"{self.call} was refused: its fencing token is not that of this attempt"


class Supervisor:
    """Methods as :mod:`worker.contract.actors` lists them, and ``push`` for the ranks. Runs with many threads."""

    rank_class: ClassVar[type[RankActor]] = RankActor

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._outbox = Outbox(1)

    def start(self, attempt_json: str) -> None:
        """Begin the attempt and return; asking again with the same token changes nothing."""
        start = AttemptStart.model_validate_json(attempt_json)
        with self._lock:
            if self._attempt is not None:
                self._check("start", start.fence)
                return
            self._outbox = self._open_outbox(start)
            me = ray.get_runtime_context().current_actor
            self._attempt = Attempt(start, self._outbox, me, self.rank_class)
        threading.Thread(target=self._attempt.run, name="attempt", daemon=True).start()

    @staticmethod
    def _open_outbox(start: AttemptStart) -> Outbox:
        if not start.report_directory:
            return Outbox(start.outbox_limit)
        folder = attempt_folder(Path(start.report_directory), start.attempt)
        try:
            journal = Journal(supervisor_files(folder))
        except OSError as error:  # the attempt is worth more
            outbox = Outbox(start.outbox_limit)
            message = f"what the supervisor tells is not kept in {folder}: {error}"
            outbox.append(Milestone(name="reports_off", at=time.time(), message=message))
            return outbox

        def keep(line: str) -> None:
            try:
                journal.append(line)
            except OSError:
                _log.exception("an entry of the supervisor of job %s is not kept in %s", start.job_id, folder)

        return Outbox(start.outbox_limit, keep)

    def poll(self, fence: str, cursor: int, limit: int) -> str:
        """Return a :class:`PollBatch` of the entries after ``cursor``, which are forgotten up to it."""
        attempt = self._check("poll", fence)
        return self._outbox.read(cursor, limit, attempt.alive_ranks).model_dump_json()

    def set_kernels(self, fence: str, policy_json: str) -> None:
        """Pass on a kernel policy; the ranks change together, some steps later."""
        self._check("set_kernels", fence).set_kernels(KernelPolicy.model_validate_json(policy_json))

    def stop(self, fence: str, request_json: str) -> None:
        """End the attempt for the reason given; the first request counts."""
        self._check("stop", fence).stop(StopRequest.model_validate_json(request_json))

    def leave(self, fence: str) -> None:
        """End this actor."""
        self._check("leave", fence)
        ray.actor.exit_actor()

    def push(self, fence: str, batch: list[str], dropped: int) -> None:
        """Take what a rank tells: entries as JSON, whose numbers are given here; what came before is left."""
        attempt = self._check("push", fence)
        self._outbox.count_dropped(dropped)
        for text in batch:
            entry = Entry.model_validate_json(text)
            if self._outbox.append(entry.body, entry.rank, entry.number):
                attempt.observe(entry.body)

    def _check(self, call: str, fence: str) -> Attempt:
        attempt = self._attempt
        if attempt is None or not hmac.compare_digest(attempt.start.fence, fence):
            raise WrongFence(call)
        return attempt
