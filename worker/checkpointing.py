"""The checkpoints of one run: where they go, what it continues from, and when it saves."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.manifest import DataPosition, KernelRecord, LaunchCount, RunRecord
from worker.checkpoints.resume import Wanted, choose, load
from worker.checkpoints.saver import Saved, SaveFacts, Saver
from worker.checkpoints.state import CheckpointedState
from worker.checkpoints.storage import find_checkpoints, lock_directory, sees_lock
from worker.checkpoints.weights import load_weights
from worker.contract.messages import NsTotals
from worker.contract.spec import JobSpec
from worker.corpus import Corpus
from worker.seat import Rank, tell

__all__ = ["RunCheckpoints", "kernel_record", "open_checkpoints", "spec_digest"]

_NOT_OF_THE_RUN = {
    "checkpoint", "failure", "watchdog", "resources", "labels", "name", "project", "priority", "preemptible",
}  # fmt: skip


@dataclass(slots=True)
class RunCheckpoints:
    """Saves when the spec says so, at the end and before a stop; knows at which step the run begins."""

    rank: Rank
    state: CheckpointedState
    run: RunRecord
    data: DataPosition
    first_step: int
    """Steps that were done before this run."""
    saver: Saver | None
    """None where no checkpoints are kept."""
    lock: int | None = None
    """Holds the directory for this process."""

    def after_step(self, done: int, ns: Sequence[NsTotals], kernels: KernelRecord) -> None:
        """Save if it is time; ``done`` counts steps from 1. The last step's checkpoint is waited for.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        every = self.rank.spec.checkpoint.every_steps
        last = done == self.rank.spec.training.steps
        if self.saver is not None and (last or (every is not None and done % every == 0)):
            self._save(self.saver, done, ns, kernels)
            if last:
                self.saver.require()

    def before_stop(self, done: int, ns: Sequence[NsTotals], kernels: KernelRecord) -> None:
        """Save what a run that is asked to stop has done, and wait for it.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.saver is None:
            return
        if done > self.first_step and self.saver.last_step != done:
            self._save(self.saver, done, ns, kernels)
        self.saver.require()

    def close(self) -> None:
        """Let the directory go. What is still being written after an error is not waited for: a peer may be gone."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def _save(self, saver: Saver, done: int, ns: Sequence[NsTotals], kernels: KernelRecord) -> None:
        launched = tuple(
            LaunchCount(
                kernel=entry.kernel, algorithm=entry.algorithm, launches=entry.launches, matrices=entry.matrices
            )
            for entry in ns
        )
        facts = SaveFacts(
            step=done,
            run=self.run,
            data=self.data.model_copy(update={"samples": done * self.data.global_batch}),
            kernels=kernels.model_copy(update={"launched": launched}),
            num_tensors=len(self.state.layout()),
        )
        saver.save(self.state.parts(), facts)


def spec_digest(spec: JobSpec) -> str:
    """Return the SHA-256 of what of a spec decides the numbers: not its name, its resources or its checkpoints."""
    return hashlib.sha256(spec.model_dump_json(exclude=_NOT_OF_THE_RUN).encode()).hexdigest()


def open_checkpoints(rank: Rank, state: CheckpointedState, corpus: Corpus, plan_hash: str) -> RunCheckpoints:
    """Resume what is to be resumed, and make ready to save; all ranks call it, before the first step.

    Raises:
        CheckpointError: the directory cannot be used, or what is to be resumed is broken or does not fit.
    """
    spec = rank.spec
    exchange = Exchange(rank.store, rank.rank, spec.world_size, rank.settings.collective_timeout_s)
    directory, lock, token = _open_directory(rank, exchange)
    data = DataPosition(
        fingerprint=corpus.fingerprint, seed=spec.data.seed, sequence_length=spec.data.sequence_length,
        global_batch=spec.training.global_batch, samples=0,
    )  # fmt: skip
    first_step = _resume(rank, state, data, directory, exchange)
    run = RunRecord(
        spec_json=spec.model_dump_json(), spec_digest=spec_digest(spec), plan_hash=plan_hash,
        optimizer=spec.optimizer.kind, world_size=spec.world_size, mesh=spec.mesh.model_dump(mode="json"),
        routes=state.routes(), vocab_size=corpus.vocab_size, first_step=first_step,
    )  # fmt: skip
    saver = None
    if directory is not None:
        saver = Saver(
            directory, spec.checkpoint.keep, spec.checkpoint.asynchronous, exchange, token,
            on_saved=lambda saved: _tell_saved(rank, saved),
            on_failed=lambda step, reason: tell(
                rank, "checkpoint_failed", f"the checkpoint of step {step} was not written: {reason}", step=step
            ),
        )  # fmt: skip
    return RunCheckpoints(rank, state, run, data, first_step, saver, lock)


def kernel_record(spec: JobSpec, device: torch.device, epoch: int | None) -> KernelRecord:
    """Return the provenance of the numbers, but for what was launched; ``epoch`` is None with a baseline."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if epoch is None:
        return KernelRecord(device=name, torch=str(torch.__version__))
    return KernelRecord(
        configured=spec.kernels.kernel, algorithm=spec.kernels.algorithm, coefficients=str(spec.kernels.coefficients),
        epoch=epoch, device=name, torch=str(torch.__version__),
    )  # fmt: skip


def _tell_saved(rank: Rank, saved: Saved) -> None:
    info = saved.info
    text = f"step {info.step}: {info.num_bytes} bytes in {saved.seconds:.2f} s at {info.path}"
    tell(
        rank, "checkpoint_saved", text, step=info.step, path=str(info.path), bytes=info.num_bytes,
        seconds=saved.seconds, stall_seconds=saved.stall_seconds,
    )  # fmt: skip


def _place(rank: Rank) -> tuple[Path | None, bool]:
    """Return where checkpoints go, and whether that place was asked for."""
    wanted = rank.spec.checkpoint
    if wanted.directory is not None:
        return Path(wanted.directory), True
    if rank.checkpoint_directory is not None:
        return rank.checkpoint_directory, False
    if wanted.every_steps is not None:
        return rank.settings.data_directory / "checkpoints" / rank.spec.name, True
    return None, False


def _open_directory(rank: Rank, exchange: Exchange) -> tuple[Path | None, int | None, str]:
    """Return the directory that all ranks write to, rank 0's lock on it, and the token of this attempt.

    A place that nobody asked for and that not all ranks share is given up, which is told.
    """
    directory, asked = _place(rank)
    if directory is None:
        return None, None, ""
    lock, word = None, "refused"
    if rank.rank == 0:
        token = uuid.uuid4().hex
        try:
            lock, word = lock_directory(directory, token), f"token {token}"
        except CheckpointError as error:
            word = f"refused {error}"
    verdict, _, token = exchange.all("checkpoint/lock", word)[0].partition(" ")
    if verdict == "refused":
        raise CheckpointError(token)
    seen = exchange.all("checkpoint/seen", "" if sees_lock(directory, token) else "no")
    blind = [str(number) for number, answer in enumerate(seen) if answer]
    if not blind:
        return directory, lock, token
    message = (
        f"ranks {', '.join(blind)} do not see {directory} as rank 0 does; name a checkpoint.directory that all nodes "
        "share"
    )
    if asked:
        raise CheckpointError(message)
    tell(rank, "checkpoints_off", f"no checkpoints are written: {message}", rank_zero_only=True)
    if lock is not None:
        os.close(lock)
    return None, None, ""


def _resume(
    rank: Rank, state: CheckpointedState, data: DataPosition, directory: Path | None, exchange: Exchange
) -> int:
    """Load what the run continues from; return how many steps that has done."""
    wanted = rank.spec.checkpoint
    # In a directory that the spec names others may have saved; a job's own place has only what the job has saved.
    own = rank.attempt > 1 and wanted.directory is None and rank.checkpoint_directory is not None
    if wanted.resume == "never" and not own:
        return 0
    explicit = None if wanted.resume in ("auto", "never") else Path(wanted.resume)
    if rank.attempt > 1 and _has_own(directory, exchange):
        explicit = None  # the job has come further than what it began with
    if explicit is not None and explicit.is_file():
        load_weights(explicit, state, exchange)
        tell(
            rank,
            "resumed",
            f"weights of {explicit}, everything else anew",
            rank_zero_only=True,
            step=0,
            path=str(explicit),
        )
        return 0
    chosen = choose(directory, explicit, exchange)
    if chosen is None:
        return 0
    for text in chosen.passed_over:
        tell(rank, "checkpoint_passed_over", text, rank_zero_only=True)
    cold = load(chosen, state, Wanted(rank.spec.training.steps, data, wanted.on_route_change), exchange)
    step = chosen.manifest.step
    anew = f"; state starts anew for {', '.join(f'{name} ({why})' for name, why in cold.items())}" if cold else ""
    mesh = chosen.manifest.run.world_size
    text = f"at step {step} from {chosen.path}, saved by {mesh} ranks{anew}"
    tell(rank, "resumed", text, rank_zero_only=True, step=step, path=str(chosen.path))
    return step


def _has_own(directory: Path | None, exchange: Exchange) -> bool:
    """Tell, as rank 0 sees it, whether the run's own directory has a complete checkpoint."""
    mine = "yes" if exchange.rank == 0 and directory is not None and find_checkpoints(directory)[0] else ""
    return bool(exchange.all("resume/own", mine)[0])
