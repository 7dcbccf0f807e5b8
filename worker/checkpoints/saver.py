"""Saving: copy to host memory between two steps, write behind the next ones, appear as a whole or not at all.

Each rank writes one file with the parts of which it is the source. Rank 0 gathers what all have written, writes the
manifest and renames the directory. At most one save is under way: the next one waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

import dmuon_runtime as dmuon
from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.manifest import (
    FORMAT_VERSION,
    DataPosition,
    FileEntry,
    KernelRecord,
    LaunchCount,
    Manifest,
    PartEntry,
    RunRecord,
    TensorEntry,
    part_key,
)
from worker.checkpoints.state import DTYPE_CODES
from worker.checkpoints.storage import (
    CheckpointInfo,
    Fault,
    commit,
    discard,
    next_sequence,
    no_fault,
    partial_directory,
)
from worker.checkpoints.tensor_file import FlatTensor, write_tensors

__all__ = ["HostCopy", "SaveFacts", "Saved", "Saver"]


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """What the manifest says beside the tensors; that of rank 0 counts, but launches are summed over ranks."""

    step: int
    run: RunRecord
    data: DataPosition
    kernels: KernelRecord
    num_tensors: int
    """Tensors of the whole state."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A save that succeeded."""

    info: CheckpointInfo
    seconds: float
    """From the call to the renamed directory."""
    stall_seconds: float
    """The part of it for which training stood still on this rank."""


@dataclass(frozen=True, slots=True)
class _Copied:
    kind: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    values: Tensor


class _Share(BaseModel):
    """What one rank has written."""

    error: str = ""
    file: FileEntry | None = None
    tensors: tuple[TensorEntry, ...] = ()
    launched: tuple[LaunchCount, ...] = ()


class HostCopy:
    """Copies parts to host memory, into the same buffers each time; pinned where the parts are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, parts: Iterable[dmuon.StatePart]) -> list[_Copied]:
        """Return copies of the parts of which this rank is the source; they are valid until the next call."""
        copied, on_device = [], False
        for part in parts:
            if not part.is_source:
                continue
            values, key = part.values(), part_key(part.kind, part.name, part.start)
            on_device |= values.is_cuda
            if key not in self._buffers:
                self._buffers[key] = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._buffers[key].copy_(values, non_blocking=True)
            copied.append(_Copied(part.kind, part.names, part.shape, part.start, self._buffers[key]))
        if on_device:
            torch.cuda.current_stream().synchronize()
        return copied


@dataclass(slots=True)
class Saver:
    """Writes the checkpoints of one rank of a run. All ranks call it alike."""

    directory: Path
    keep: int
    asynchronous: bool
    exchange: Exchange
    token: str
    """The same on all ranks of an attempt, and no other attempt's."""
    on_saved: Callable[[Saved], None]
    """Called on rank 0, from the writing thread."""
    on_failed: Callable[[int, str], None]
    """Called with the step and the reason on rank 0, from the writing thread; training goes on."""
    fault: Fault = no_fault
    last_step: int | None = None
    """Step of the last save that was begun."""
    _host: HostCopy = field(default_factory=HostCopy)
    _thread: threading.Thread | None = None
    _failure: str = ""

    def save(self, parts: Iterable[dmuon.StatePart], facts: SaveFacts) -> float:
        """Begin to save; returns the seconds for which training stood still."""
        begin = time.perf_counter()
        self.finish()
        copied = self._host.take(parts)
        self.last_step = facts.step
        stall = time.perf_counter() - begin
        arguments = (copied, facts, begin, stall)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        if not self.asynchronous:
            self.finish()
        return time.perf_counter() - begin

    def finish(self) -> str:
        """Wait for the save that is under way; returns why the last one failed, or nothing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._failure

    def require(self) -> None:
        """Wait for the last save.

        Raises:
            CheckpointError: it failed, here or on another rank.
        """
        failure = self.finish()
        if failure:
            raise CheckpointError(f"the checkpoint of step {self.last_step} could not be written: {failure}")

    def _write(self, copied: list[_Copied], facts: SaveFacts, begin: float, stall: float) -> None:
        """Body of the writing thread: every rank learns how the whole save ended."""
        topic = f"checkpoint/{self.token}/{facts.step}"
        partial = partial_directory(self.directory, facts.step, self.token)
        share = self._write_share(copied, facts, partial)
        try:
            self.exchange.post(topic, share.model_dump_json())
            if self.exchange.rank == 0:
                self._failure = self._conclude(topic, partial, facts, begin, stall)
                self.exchange.post(f"{topic}/end", self._failure)
            else:
                self._failure = self.exchange.read(f"{topic}/end", 0)
        except Exception as error:  # nobody joins a thread's exception: it is what finish() returns
            self._failure = f"{type(error).__name__}: {error}"

    def _write_share(self, copied: list[_Copied], facts: SaveFacts, partial: Path) -> _Share:
        name = f"rank-{self.exchange.rank:05d}.safetensors"
        try:
            self.fault("write")
            partial.mkdir(parents=True, exist_ok=True)
            (partial / name).unlink(missing_ok=True)
            size, digest = write_tensors(partial / name, _flats(copied), lambda: self.fault("file"))
        except Exception as error:  # whatever it is, rank 0 waits for a word
            return _Share(error=f"{type(error).__name__}: {error}")
        tensors = tuple(_entry(entry, self.exchange.rank) for entry in copied)
        file = FileEntry(name=name, num_bytes=size, sha256=digest)
        return _Share(file=file, tensors=tensors, launched=facts.kernels.launched)

    def _conclude(self, topic: str, partial: Path, facts: SaveFacts, begin: float, stall: float) -> str:
        """Commit what all ranks have written; returns why that failed, or nothing."""
        failure = ""
        try:
            texts = [self.exchange.read(topic, rank) for rank in range(self.exchange.world_size)]
            shares = [_Share.model_validate_json(text) for text in texts]
            failure = "; ".join(f"rank {rank}: {share.error}" for rank, share in enumerate(shares) if share.error)
            if not failure:
                manifest = _manifest(facts, shares, next_sequence(self.directory))
                path = commit(partial, manifest, self.keep, self.fault)
                info = CheckpointInfo(path, facts.step, manifest.sequence, manifest.num_bytes, manifest.created_at)
                self.on_saved(Saved(info, time.perf_counter() - begin, stall))
        except Exception as error:  # whatever it is, the other ranks wait for a word
            failure = f"{type(error).__name__}: {error}"
        if failure:
            discard(partial)
            self.on_failed(facts.step, failure)
        return failure


def _flats(copied: list[_Copied]) -> list[FlatTensor]:
    """Return the parts as bytes, wide elements first, so that each is aligned in the file."""
    return [_flat(entry) for entry in sorted(copied, key=lambda entry: -entry.values.element_size())]


def _flat(entry: _Copied) -> FlatTensor:
    data = memoryview(entry.values.view(torch.uint8).numpy())  # type: ignore[arg-type]
    key = part_key(entry.kind, entry.names[0], entry.start)
    return FlatTensor(key, DTYPE_CODES[entry.values.dtype], entry.values.numel(), data)


def _entry(entry: _Copied, rank: int) -> TensorEntry:
    part = PartEntry(file=rank, start=entry.start, stop=entry.start + entry.values.numel())
    dtype = DTYPE_CODES[entry.values.dtype]
    return TensorEntry(kind=entry.kind, names=entry.names, shape=entry.shape, dtype=dtype, parts=(part,))


def _manifest(facts: SaveFacts, shares: list[_Share], sequence: int) -> Manifest:
    """Join what the ranks have written.

    Raises:
        CheckpointError: it is not the whole state, each element once: a mistake of ours that must not be kept.
    """
    tensors: dict[tuple[str, str], TensorEntry] = {}
    for share in shares:
        for entry in share.tensors:
            key = (entry.kind, entry.names[0])
            parts = (*tensors[key].parts, *entry.parts) if key in tensors else entry.parts
            tensors[key] = entry.model_copy(update={"parts": parts})
    launched: dict[tuple[str, str], LaunchCount] = {}
    for count in (count for share in shares for count in share.launched):
        known = launched.get((count.kernel, count.algorithm))
        update = {} if known is None else {
            "launches": known.launches + count.launches, "matrices": known.matrices + count.matrices,
        }  # fmt: skip
        launched[count.kernel, count.algorithm] = count.model_copy(update=update)
    assert len(tensors) == facts.num_tensors, f"{len(tensors)} of {facts.num_tensors} tensors have a source"
    manifest = Manifest(
        format_version=FORMAT_VERSION, step=facts.step, sequence=sequence, created_at=time.time(), run=facts.run,
        data=facts.data, kernels=facts.kernels.model_copy(update={"launched": tuple(launched.values())}),
        tensors=tuple(tensors.values()), files=tuple(share.file for share in shares if share.file is not None),
    )  # fmt: skip
    return Manifest.parse(manifest.dump())
