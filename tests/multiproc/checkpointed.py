"""Checkpoints of small models without a job: what the state tests share."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

import dmuon_runtime as dmuon
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.manifest import DataPosition, KernelRecord, RunRecord
from worker.checkpoints.reader import Reader
from worker.checkpoints.resume import Chosen, OnRouteChange, Wanted, choose, load
from worker.checkpoints.saver import SaveFacts, Saver
from worker.checkpoints.state import CheckpointedState, DmuonState
from worker.checkpoints.storage import newest_complete, read_manifest

__all__ = ["DATA", "contents", "facts_of", "make_exchange", "newest", "resume_from", "save_to", "whole_state"]

DATA = DataPosition(fingerprint="text", seed=0, sequence_length=7, global_batch=12, samples=0)


def make_exchange(topic: str, rank: int = 0, world_size: int = 1) -> Exchange:
    """Return an exchange over the default group's store; ``topic`` must be new."""
    return Exchange(PrefixStore(topic, _get_default_store()), rank, world_size, 30.0)


def facts_of(state: CheckpointedState, step: int) -> SaveFacts:
    """Return what a manifest needs beside the tensors."""
    run = RunRecord(
        spec_json="{}", spec_digest="", plan_hash="", optimizer="dmuon", world_size=1, mesh={}, routes=state.routes(),
        vocab_size=13, first_step=0,
    )  # fmt: skip
    kernels = KernelRecord(
        configured="auto", algorithm="gram", coefficients="", epoch=0, device="cpu", torch=str(torch.__version__)
    )
    return SaveFacts(step, run, DATA, kernels, len(state.layout()))


def save_to(directory: Path, state: CheckpointedState, step: int, exchange: Exchange, token: str = "t") -> None:
    """Save and wait; fails the test when the save fails."""
    failures: list[str] = []
    saver = Saver(
        directory, 10, True, exchange, token, on_saved=lambda saved: None,
        on_failed=lambda at, reason: failures.append(reason),
    )  # fmt: skip
    saver.save(state.parts(), facts_of(state, step))
    saver.require()
    assert not failures


def resume_from(
    directory: Path | None,
    state: CheckpointedState,
    exchange: Exchange,
    explicit: Path | None = None,
    policy: OnRouteChange = "refuse",
    steps: int = 100,
) -> Chosen:
    """Choose and load."""
    chosen = choose(directory, explicit, exchange)
    assert chosen is not None, f"nothing in {directory}"
    load(chosen, state, Wanted(steps, DATA, policy), exchange)
    return chosen


def contents(path: Path) -> dict[tuple[str, str], Tensor]:
    """Return every tensor of a checkpoint by kind and each of its names."""
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    return {(entry.kind, name): reader.whole(entry) for entry in manifest.tensors for name in entry.names}


def whole_state(state: DmuonState) -> dict[tuple[str, str], Tensor]:
    """Return the same of a live model and optimizer; collective."""
    found = {("weight", name): value for name, value in dmuon.get_model_state_dict(state.model).items()}
    optimizer = dmuon.get_optimizer_state_dict(state.model, state.optimizer)["state"]
    return found | {(kind, name): value for name, slots in optimizer.items() for kind, value in slots.items()}


def newest(directory: Path) -> Path:
    """Return the newest checkpoint of a directory."""
    info = newest_complete(directory)
    assert info is not None
    return info.path
