"""Ranks that do as a label of their spec says; importable by the processes of a test's Ray."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from worker.actors.rank import RankActor
from worker.actors.supervisor import Supervisor
from worker.contract.messages import Milestone
from worker.contract.spec import JobSpec

__all__ = ["FakeRank", "FakeSupervisor", "KeywordOnly"]


class KeywordOnly(Exception):
    """Cannot be rebuilt from its ``args``: plain pickling loses it."""

    def __init__(self, *, number: int) -> None:
        self.number = number
        super().__init__(f"gave up with {number}")


class FakeRank(RankActor):
    """Joins the group and then, instead of training, takes steps of 50 ms until something happens."""

    def prepare(self, serve: bool) -> str:
        if _label(self._attempt.spec_json) == "broken_import":
            os.environ["PYTHONPATH"] = ""
            raise SystemExit("No module named 'torch_of_another_world'")
        if _label(self._attempt.spec_json) == "slow_import":
            time.sleep(60)
        return super().prepare(serve)

    def train(self, seat: Any) -> str:
        import torch.distributed as dist

        from dmuon_runtime.progress import PROGRESS
        from worker.control import Agreement
        from worker.rendezvous import join_group
        from worker.train import Phase

        join_group(seat.store, seat.rank, seat.spec.world_size, seat.device, join_timeout_s=30, timeout_s=60)
        seat.phase = Phase.DONE
        if seat.rank == 0:
            seat.sink(Milestone(name="group_formed", at=time.time(), message="fake"))
        agreement, fault = Agreement(seat.mailbox, timeout_s=60), _label(self._attempt.spec_json)
        for step in range(seat.spec.training.steps):
            directive = agreement.next(last=step + 1 == seat.spec.training.steps)
            if directive.stop:
                return "stopped"
            if fault in ("hang", "stop") and step == 3:
                seat.phase = Phase.TRAINING
                PROGRESS.enter("forward")
            if step == 3 and seat.rank == 1:
                _misbehave(fault)
            if fault == "deaf" and step == 3:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                time.sleep(600)
            with PROGRESS.waiting("the barrier"):
                dist.barrier()
            text = f"{step} epoch {directive.policy.epoch}"
            seat.sink(Milestone(name="kernel_changed", at=time.time(), message=text, rank=seat.rank))
            time.sleep(0.05)
        return "completed"


def _misbehave(fault: str) -> None:
    if fault == "raise":
        raise KeywordOnly(number=7)
    if fault == "exit":
        os._exit(3)
    if fault == "hang":
        time.sleep(600)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def _label(spec_json: str) -> str:
    return JobSpec.model_validate_json(spec_json).labels.get("fault", "")


class FakeSupervisor(Supervisor):
    """A supervisor of fake ranks."""

    rank_class = FakeRank
