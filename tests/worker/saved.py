"""A state of two plain tensors and its checkpoints: what the checkpoint tests share. No process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon_runtime import StatePart, StateTensor
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.manifest import DataPosition, KernelRecord, LaunchCount, RunRecord
from worker.checkpoints.reader import Reader
from worker.checkpoints.resume import OnRouteChange, Wanted, choose, load
from worker.checkpoints.saver import SaveFacts, Saver
from worker.checkpoints.storage import Fault, inspect, no_fault, read_manifest, verify_files

__all__ = [
    "DATA",
    "PlainState",
    "alone",
    "facts",
    "half_state",
    "make_saver",
    "resume",
    "rewrite_manifest",
    "save",
    "step_in",
]

DATA = DataPosition(fingerprint="text", seed=0, sequence_length=32, global_batch=12, samples=0)


@dataclass
class PlainState:
    """One matrix with momentum, and its bias with moments; satisfies ``CheckpointedState``."""

    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=lambda: {"matrix": "muon", "bias": "adamw"})
    """Routes by name."""
    rows: int = 4

    def __post_init__(self) -> None:
        for name, route in self.names.items():
            shape = (self.rows, 3) if name == "matrix" else (3,)
            kinds = ("weight", "momentum_buffer") if route == "muon" else ("weight", "exp_avg", "exp_avg_sq")
            for kind in kinds:
                self.tensors.setdefault((kind, name), torch.zeros(shape))
            if route != "muon":
                self.tensors.setdefault(("step", name), torch.zeros(()))

    def fill(self, value: float) -> None:
        """Make every element ``value``."""
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def parts(self) -> list[StatePart]:
        return [StatePart(kind, (name,), tuple(t.shape), 0, t, True) for (kind, name), t in self.tensors.items()]

    def layout(self) -> list[StateTensor]:
        return [StateTensor(kind, (name,), tuple(t.shape), t.dtype) for (kind, name), t in self.tensors.items()]

    def load(self, read: Callable[[StatePart], Tensor | None]) -> None:
        found = [(part, read(part)) for part in self.parts()]
        for part, values in found:
            if values is not None:
                part.load(values)

    def routes(self) -> dict[str, str]:
        return dict(self.names)


def half_state(rank: int) -> list[StatePart]:
    """Return what one of two ranks holds of a state whose elements are all 2: half of the rows of each matrix."""
    state, found = PlainState(), []
    state.fill(2)
    for part in state.parts():
        if part.name == "matrix":
            found.append(
                StatePart(part.kind, part.names, part.shape, rank * 6, part.values()[rank * 6 : rank * 6 + 6], True)
            )
        else:
            found.append(replace(part, is_source=rank == 1))
    return found


def alone() -> Exchange:
    """Return an exchange of one rank with itself."""
    return Exchange(dist.HashStore(), 0, 1, 30.0)


def facts(state: PlainState, step: int, data: DataPosition = DATA) -> SaveFacts:
    """Return what a manifest needs beside the tensors."""
    run = RunRecord(
        spec_json="{}", spec_digest="", plan_hash="", optimizer="dmuon", world_size=1, mesh={}, routes=state.routes(),
        vocab_size=256, first_step=0,
    )  # fmt: skip
    kernels = KernelRecord(
        configured="auto", algorithm="gram", coefficients="", epoch=0, device="cpu", torch="2",
        launched=(LaunchCount(kernel="cublas", algorithm="gram", launches=6, matrices=2),),
    )  # fmt: skip
    return SaveFacts(
        step, run, data.model_copy(update={"samples": step * data.global_batch}), kernels, len(state.layout())
    )


def make_saver(
    directory: Path, *, keep: int = 2, asynchronous: bool = False, fault: Fault = no_fault,
    told: list[str] | None = None, token: str = "t", exchange: Exchange | None = None,
) -> Saver:  # fmt: skip
    """Return a saver, of one rank unless there is an ``exchange``; ``told`` gets what is said to people."""
    words = [] if told is None else told
    return Saver(
        directory, keep, asynchronous, exchange or alone(), token,
        on_saved=lambda saved: words.append(f"saved {saved.info.step}"),
        on_failed=lambda step, reason: words.append(f"failed {step}: {reason}"), fault=fault,
    )  # fmt: skip


def save(directory: Path, *steps: int, keep: int = 10, state: PlainState | None = None) -> None:
    """Save each step, all elements of the state being the step's number."""
    saver = make_saver(directory, keep=keep)
    for step in steps:
        state = state or PlainState()
        state.fill(step)
        saver.save(state.parts(), facts(state, step))
        saver.require()


def resume(
    directory: Path | None, state: PlainState, *, explicit: Path | None = None, policy: OnRouteChange = "refuse",
    steps: int = 100, data: DataPosition = DATA,
) -> int | None:  # fmt: skip
    """Choose and load; return the step, or None where there is nothing."""
    exchange = alone()
    chosen = choose(directory, explicit, exchange)
    if chosen is None:
        return None
    load(chosen, state, Wanted(steps, data, policy), exchange)
    return chosen.manifest.step


def step_in(path: Path) -> int:
    """Return the step of a checkpoint after verifying all of it: hashes, and that each element is the step's number."""
    info, manifest = inspect(path), read_manifest(path)
    assert verify_files(path, manifest) == []
    reader = Reader(path, manifest)
    for entry in manifest.tensors:
        assert torch.equal(reader.whole(entry), torch.full(entry.shape, float(info.step)))
    return info.step


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it the hash of what it then says: a lie that its own hash does not show."""
    import hashlib
    import json

    body = json.loads(read_manifest(path).model_dump_json())
    change(body)
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": text}))
