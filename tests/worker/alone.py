"""Train a job of one rank in this very process: quick enough for many small runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from worker.contract.kernels import KernelPolicy
from worker.contract.messages import Milestone, RankReport
from worker.contract.spec import JobSpec
from worker.control import Mailbox
from worker.settings import WorkerSettings
from worker.train import Outcome, Rank, train

__all__ = ["Run", "run_alone"]


@dataclass
class Run:
    """What a run told and left."""

    outcome: Outcome | None = None
    reports: list[RankReport] = field(default_factory=list)
    milestones: list[Milestone] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def told(self, name: str) -> list[Milestone]:
        """Return the milestones of a name."""
        return [milestone for milestone in self.milestones if milestone.name == name]


def run_alone(
    spec: JobSpec, folder: Path, *, stop_at: int | None = None, attempt: int = 1, directory: Path | None = None,
    policy: KernelPolicy | None = None,
) -> Run:  # fmt: skip
    """Train ``spec`` to its end, or ask it to stop when it reports step ``stop_at`` (0: before the first).

    ``policy`` is the operator's word that the attempt begins with. Errors come through.
    """
    found, mailbox, weights = Run(), Mailbox(policy or KernelPolicy()), folder / "weights.pt"

    def sink(body: RankReport | Milestone) -> None:
        if isinstance(body, RankReport):
            found.reports.append(body)
            if body.step == stop_at:
                mailbox.stop()
        else:
            found.milestones.append(body)

    if stop_at == 0:
        mailbox.stop()
    settings = WorkerSettings(cache_directory=folder / "cache", data_directory=folder / "data")
    seat = Rank(
        spec, 0, torch.device("cpu"), dist.HashStore(), settings, mailbox, sink, save=weights, attempt=attempt,
        checkpoint_directory=directory,
    )  # fmt: skip
    found.outcome = train(seat)
    found.weights = torch.load(weights, weights_only=True)
    return found
