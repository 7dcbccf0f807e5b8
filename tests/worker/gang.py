"""Runs the worker's own training on several ranks without Ray, with the mailbox of rank 0 in the test's hands."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from worker.contract.kernels import KernelPolicy, KernelTarget, SwapOrder
from worker.contract.messages import Milestone, RankReport
from worker.contract.spec import JobSpec

__all__ = ["Run", "Step", "Told", "run_gang", "train_once"]


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank reported of a step."""

    number: int
    """Counted from 1."""
    loss: float
    epoch: int
    applied: dict[str, int]
    """Matrices by kernel, from the ledger."""
    launched: dict[tuple[str, str], int]
    """Launches by kernel and algorithm, from the ledger."""
    fallback_calls: int
    memory_bytes: int
    offenders: tuple[str, ...]


@dataclass
class Told:
    """What one rank told in one training run."""

    steps: list[Step] = field(default_factory=list)
    milestones: list[Milestone] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def named(self, name: str) -> list[Milestone]:
        """Return the milestones of a name."""
        return [note for note in self.milestones if note.name == name]


@dataclass
class Run:
    """A training run in progress; on rank 0 something can be said to it."""

    rank: int
    mailbox: Any
    told: Told = field(default_factory=Told)
    policy: KernelPolicy = field(default_factory=KernelPolicy)
    _counted: Counter[str] = field(default_factory=Counter)
    _launched: Counter[tuple[str, str]] = field(default_factory=Counter)

    def say(self, **changes: Any) -> None:
        """Send a policy of a new epoch to the mailbox."""
        self.policy = self.policy.model_copy(update={"epoch": self.policy.epoch + 1, **changes})
        self.mailbox.set_kernels(self.policy)

    def swap(self, deadline_s: float = 60.0, **target: str) -> None:
        """Order a swap."""
        asked = KernelTarget.model_validate(target)
        self.say(swap=SwapOrder(number=self.policy.epoch + 1, target=asked, deadline_s=deadline_s))

    def take(self, body: RankReport | Milestone) -> None:
        """Note what the rank tells."""
        if isinstance(body, Milestone):
            self.told.milestones.append(body)
            return
        counted: Counter[str] = Counter()
        launched: Counter[tuple[str, str]] = Counter()
        for entry in body.ns:
            counted[str(entry.kernel)] += entry.matrices
            launched[str(entry.kernel), str(entry.algorithm)] += entry.launches
        step = Step(
            body.step, body.loss, body.kernel_epoch, dict(counted - self._counted), dict(launched - self._launched),
            body.fallback_calls, body.memory_bytes, body.offenders,
        )  # fmt: skip
        self._counted, self._launched = counted, launched
        self.told.steps.append(step)


Hear = Callable[[Run, RankReport | Milestone], None]


def train_once(spec: JobSpec, address: str, rank: int, hear: Hear, **settings: Any) -> Told:
    """Train in this process as one rank; ``hear`` is called with everything that the rank tells.

    On the GPU of the rank's number where the spec asks for whole ones.
    """
    import torch

    from worker import train
    from worker.control import Mailbox
    from worker.device import decide_device
    from worker.rendezvous import connect_store
    from worker.settings import WorkerSettings

    torch.set_num_threads(1)
    run = Run(rank, Mailbox())

    def sink(body: RankReport | Milestone) -> None:
        run.take(body)
        hear(run, body)

    store = connect_store(address, 60)
    train.train(train.Rank(spec, rank, decide_device(spec, rank), store, WorkerSettings(**settings), run.mailbox, sink))
    return run.told


def _child(pipe: Connection, rank: int, addresses: list[str], body: Callable[..., Any]) -> None:
    try:
        pipe.send((True, body(rank, addresses)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def run_gang(
    num_processes: int, body: Callable[[int, list[str]], Any], *, num_stores: int = 1, deadline_s: float = 120.0
) -> list[Any]:
    """Call ``body(number, addresses)`` in processes of their own; ``addresses`` are of fresh stores.

    Returns:
        What each returned; None for one that is gone. One that raised fails the test.
    """
    from worker.rendezvous import serve_store

    stores = [serve_store("127.0.0.1", 60) for _ in range(num_stores)]
    addresses = [f"127.0.0.1:{store.port}" for store in stores]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "transformers.models.llama", "worker.train"])
    pipes, processes = [], []
    for number in range(num_processes):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, number, addresses, body), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    deadline, answers = time.monotonic() + deadline_s, []
    for number, pipe in enumerate(pipes):
        try:
            answered = pipe.poll(max(0.0, deadline - time.monotonic()))
            answers.append(pipe.recv() if answered else (False, f"process {number} hangs"))
        except EOFError:
            answers.append((True, None))
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    failed = [str(text) for good, text in answers if not good]
    assert not failed, "\n".join(failed)
    return [value for _, value in answers]
