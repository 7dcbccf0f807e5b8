"""What one rank of a run is given, and where it has come to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from worker.contract.messages import Milestone
from worker.contract.spec import JobSpec
from worker.control import Mailbox
from worker.report import Sink
from worker.settings import WorkerSettings

__all__ = ["Phase", "Rank", "tell"]


class Phase(StrEnum):
    """Where a rank is; what fails before ``TRAINING`` is a failure of the set-up."""

    JOINING = "joining"
    """Only this process exists; the process group is being formed."""
    BUILDING = "building"
    """The process group exists; corpus, model and optimizer are being made."""
    TRAINING = "training"
    """Everything exists; steps are being done."""
    DONE = "done"
    """The process group is gone."""


@dataclass(slots=True)
class Rank:
    """What one rank is given, and the phase it has come to."""

    spec: JobSpec
    rank: int
    device: torch.device
    store: Store
    settings: WorkerSettings
    mailbox: Mailbox
    sink: Sink
    plan_hash: str | None = None
    """The plan that the job was accepted with; None where there was no such step."""
    save: Path | None = None
    """Where rank 0 writes the final weights."""
    phase: Phase = Phase.JOINING
    checkpoint_directory: Path | None = None
    """Where checkpoints go when the spec names no place; None keeps none."""
    attempt: int = 1
    """Attempts after the first continue from what the job itself has saved, if there is something."""
    step: int = 0
    """Step in progress, counted from 1."""
    steps_done: int = 0
    """Steps that this attempt has done."""
    told: Exception | None = None
    """An error that the sink was told before it was raised further."""


def tell(
    rank: Rank, name: str, message: str, *, rank_zero_only: bool = False, **data: str | int | float | bool
) -> None:
    """Send a milestone."""
    if rank_zero_only and rank.rank != 0:
        return
    rank.sink(
        Milestone.model_validate({"name": name, "at": time.time(), "message": message, "rank": rank.rank, "data": data})
    )
