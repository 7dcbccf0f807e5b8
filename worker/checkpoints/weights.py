"""Weights alone: a model on disk into a run, and a checkpoint out to transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import dmuon_runtime as dmuon
from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.manifest import Manifest
from worker.checkpoints.reader import Reader
from worker.checkpoints.state import CheckpointedState
from worker.checkpoints.storage import named_checkpoint, read_manifest, verify_files
from worker.contract.spec import JobSpec

__all__ = ["export_model", "load_weights", "read_weights", "whole_weights"]

_WEIGHT = "weight"
_WRAPPERS = ("model", "state_dict", "model_state_dict")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name: safetensors, or ``torch.save`` of a model's ``state_dict()``.

    A dictionary that holds the state dict under ``model``, ``state_dict`` or ``model_state_dict`` is opened, and a
    ``module.`` that DDP put before every name is dropped.

    Raises:
        CheckpointError: the file cannot be read, is cut, or holds something else.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the readers of torch and safetensors raise
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    for key in _WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{path} holds no state dict: names and tensors were expected")
    if all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): value for name, value in found.items()}
    return cast("dict[str, Tensor]", found)


def load_weights(path: Path, state: CheckpointedState, exchange: Exchange) -> None:
    """Load the weights of a file into a run whose optimizer starts anew; all ranks call it.

    Raises:
        CheckpointError: with every difference, before anything was changed, on all ranks.
    """
    tensors: dict[str, Tensor] = {}
    try:
        tensors = read_weights(path)
        problems = _differences(tensors, state)
    except CheckpointError as error:
        problems = [str(error)]
    answers = exchange.all("resume/weights", "\n".join(problems))
    if any(answers):
        lines = dict.fromkeys(line for answer in answers for line in answer.splitlines())
        raise CheckpointError(f"the weights in {path} do not fit this job, nothing was loaded", lines)

    def read(part: dmuon.StatePart) -> Tensor | None:
        if part.kind != _WEIGHT:
            return None
        name = next(name for name in part.names if name in tensors)
        return tensors[name].reshape(-1)[part.start : part.stop]

    state.load(read)


def _differences(tensors: Mapping[str, Tensor], state: CheckpointedState) -> list[str]:
    found: list[str] = []
    known: set[str] = set()
    for entry in state.layout():
        if entry.kind != _WEIGHT:
            continue
        known |= set(entry.names)
        present = [name for name in entry.names if name in tensors]
        if not present:
            found.append(f"missing {entry.names[0]}")
        for name in present:
            if tuple(tensors[name].shape) != entry.shape:
                found.append(f"{name} has shape {tuple(tensors[name].shape)}, the job's {entry.shape}")
            elif not torch.equal(tensors[name], tensors[present[0]]):
                found.append(f"{present[0]} and {name} are one tensor in the job, but differ")
    return found + [f"unexpected {name}" for name in tensors if name not in known]


def whole_weights(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Return the manifest of a checkpoint and its weights by every name.

    Raises:
        CheckpointError: it is incomplete or damaged.
    """
    path = named_checkpoint(path, "checkpoint")
    manifest = read_manifest(path)
    problems = verify_files(path, manifest)
    if problems:
        raise CheckpointError(f"{path} is damaged", problems)
    reader = Reader(path, manifest)
    found: dict[str, Tensor] = {}
    for entry in manifest.tensors:
        if entry.kind == _WEIGHT:
            whole = reader.whole(entry)
            found.update(dict.fromkeys(entry.names, whole))
    return manifest, found


def export_model(path: Path, target: Path) -> None:
    """Write the model of a checkpoint as a directory that ``from_pretrained`` of transformers reads.

    Raises:
        CheckpointError: it is incomplete or damaged, or ``target`` exists.
        PlanRefused: the job's model cannot be built by the installed transformers.
    """
    from worker.model import build_model

    if target.exists():
        raise CheckpointError(f"{target} exists; name a directory that does not")
    manifest, weights = whole_weights(path)
    spec = JobSpec.model_validate_json(manifest.run.spec_json)
    model: nn.Module = build_model(spec, manifest.run.vocab_size, meta=True)
    model.load_state_dict(weights, assign=True)
    partial = target.with_name(f"{target.name}.partial")
    cast(Any, model).save_pretrained(partial)
    partial.rename(target)
