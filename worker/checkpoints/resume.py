"""Which checkpoint a run continues from, whether it fits, and loading it: all ranks decide alike, or none goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import dmuon_runtime as dmuon
from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.manifest import DataPosition, Manifest, TensorEntry
from worker.checkpoints.reader import Reader
from worker.checkpoints.state import DTYPE_CODES, CheckpointedState
from worker.checkpoints.storage import find_checkpoints, named_checkpoint, read_manifest, verify_files

__all__ = ["Chosen", "OnRouteChange", "Wanted", "choose", "compare", "decide_cold", "load"]

OnRouteChange = Literal["refuse", "keep", "cold"]
_WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint whose files are all verified."""

    path: Path
    manifest: Manifest
    passed_over: tuple[str, ...]
    """Newer ones that are damaged, and why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the run that resumes is going to do."""

    steps: int
    data: DataPosition
    """Of its own spec; ``samples`` is not looked at."""
    on_route_change: OnRouteChange


def choose(directory: Path | None, explicit: Path | None, exchange: Exchange) -> Chosen | None:
    """Return the explicit checkpoint, or the newest sound one of ``directory``, or None where there is none at all.

    The ranks share the reading of its files, and all learn what each has found.

    Raises:
        CheckpointError: the explicit one is absent or broken; or there are checkpoints, but none is sound.
    """
    if explicit is None and directory is None:
        return None
    found = exchange.all("resume/candidates", _candidates(directory, explicit) if exchange.rank == 0 else "")[0]
    kind, _, text = found.partition("\n")
    if kind == "refused":
        raise CheckpointError(text)
    passed_over: list[str] = []
    for number, path in enumerate(Path(line) for line in text.splitlines() if line):
        problems = "; ".join(_problems(path, exchange))
        answers = exchange.all(f"resume/verify/{number}", problems)
        wrong = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        if not wrong:
            return Chosen(path, read_manifest(path), tuple(passed_over))
        passed_over.append(f"{path}: {'; '.join(wrong)}")
        if explicit is not None:
            raise CheckpointError(f"{path} cannot be resumed from, nothing was loaded", wrong)
    if passed_over:
        raise CheckpointError(_NONE_SOUND.format(directory), passed_over)
    return None


_NONE_SOUND = "{} has checkpoints, but none that is sound; repair one, or start anew with checkpoint.resume: never"


def _candidates(directory: Path | None, explicit: Path | None) -> str:
    """Return a word and the paths to try, a line each: what rank 0 tells the others."""
    try:
        if explicit is not None:
            return f"found\n{named_checkpoint(explicit, 'checkpoint.resume')}"
        assert directory is not None, "there is a place to look at"
        complete, broken = find_checkpoints(directory)
    except (CheckpointError, OSError) as error:
        return f"refused\n{error}"
    if broken and not complete:
        return f"refused\n{CheckpointError(_NONE_SOUND.format(directory), [str(error) for error in broken])}"
    return "\n".join(["found", *(str(info.path) for info in complete)])


def _problems(path: Path, exchange: Exchange) -> list[str]:
    try:
        return verify_files(path, read_manifest(path), exchange.rank, exchange.world_size)
    except CheckpointError as error:
        return [str(error)]


def compare(
    manifest: Manifest, layout: Sequence[dmuon.StateTensor], routes: Mapping[str, str], wanted: Wanted
) -> list[str]:
    """Return every difference between a checkpoint and the run that would load it; empty when it fits."""
    found = [*_run_differences(manifest, wanted)]
    cold = decide_cold(manifest, routes, wanted.on_route_change)
    stored = {(entry.kind, name): entry for entry in manifest.tensors for name in entry.names}
    used: set[int] = set()
    for tensor in layout:
        entries = {id(e): e for name in tensor.names if (e := stored.get((tensor.kind, name))) is not None}
        used |= entries.keys()
        if tensor.kind != _WEIGHT and tensor.names[0] in cold:
            continue  # an optimizer that starts without it, which was allowed
        found += _tensor_differences(tensor, list(entries.values()))
    changed = set(cold)
    for entry in manifest.tensors:
        if id(entry) not in used and not (entry.kind != _WEIGHT and changed & set(entry.names)):
            found.append(f"unexpected {entry.kind} of {entry.names[0]}, which the job does not have")
    if wanted.on_route_change == "refuse":
        found += _route_differences(manifest, routes)
    return found


def _run_differences(manifest: Manifest, wanted: Wanted) -> list[str]:
    theirs, ours = manifest.data, wanted.data
    found = [
        f"data: {name} was {before} and is {now}"
        for name, before, now in (
            ("fingerprint of the text", theirs.fingerprint, ours.fingerprint),
            ("seed", theirs.seed, ours.seed),
            ("sequence_length", theirs.sequence_length, ours.sequence_length),
            ("global_batch", theirs.global_batch, ours.global_batch),
        )
        if before != now
    ]
    if manifest.step > wanted.steps:
        found.append(f"training.steps: {manifest.step} are done, the job has {wanted.steps}")
    return found


def _tensor_differences(tensor: dmuon.StateTensor, entries: list[TensorEntry]) -> list[str]:
    what = f"{tensor.kind} of {tensor.names[0]}"
    if not entries:
        return [f"missing {what}"]
    if len(entries) > 1:
        return [f"{what}: {' and '.join(tensor.names)} are one tensor in the job, and several in the checkpoint"]
    (entry,) = entries
    found = []
    alone = set(entry.names) - set(tensor.names)
    if alone:
        found.append(
            f"{what}: in the checkpoint it is one tensor with {', '.join(sorted(alone))}, in the job it is not"
        )
    if entry.shape != tensor.shape:
        found.append(f"{what} has shape {entry.shape}, the job's {tensor.shape}")
    if entry.dtype != DTYPE_CODES[tensor.dtype]:
        found.append(f"{what} is {entry.dtype}, the job's {DTYPE_CODES[tensor.dtype]}")
    return found


def _changed_routes(manifest: Manifest, routes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return old and new route of what changed, by the name that the run uses and by that of the checkpoint."""
    aliases = {name: entry.names for entry in manifest.tensors if entry.kind == _WEIGHT for name in entry.names}
    before = {alias: route for name, route in manifest.run.routes.items() for alias in aliases.get(name, (name,))}
    names = {*routes, *(name for name in manifest.run.routes if not set(aliases.get(name, (name,))) & routes.keys())}
    return {
        name: (before.get(name, "frozen"), routes.get(name, "frozen"))
        for name in sorted(names)
        if before.get(name, "frozen") != routes.get(name, "frozen")
    }


def _route_differences(manifest: Manifest, routes: Mapping[str, str]) -> list[str]:
    return [
        f"route of {name} was {before} and is {now}; checkpoint.on_route_change: keep or cold allows it"
        for name, (before, now) in _changed_routes(manifest, routes).items()
    ]


_SAME_STATE = frozenset({"adamw", "sharded_adamw"})


def decide_cold(manifest: Manifest, routes: Mapping[str, str], policy: OnRouteChange) -> dict[str, str]:
    """Return the parameters whose optimizer state starts anew, with the reason.

    ``keep`` takes over what means the same under the new route: AdamW's moments, wherever they are kept.
    """
    return {
        name: f"{before} -> {now}"
        for name, (before, now) in _changed_routes(manifest, routes).items()
        if policy == "cold" or not {before, now} <= _SAME_STATE
    }


def load(chosen: Chosen, state: CheckpointedState, wanted: Wanted, exchange: Exchange) -> dict[str, str]:
    """Load a checkpoint that fits; returns the parameters whose optimizer state starts anew, with the reason.

    Raises:
        CheckpointError: with every difference, before anything was changed, on all ranks.
    """
    manifest, routes = chosen.manifest, state.routes()
    differences = compare(manifest, state.layout(), routes, wanted)
    answers = exchange.all("resume/compare", "\n".join(differences))
    if any(answers):
        ours = dict.fromkeys(line for answer in answers for line in answer.splitlines())
        raise CheckpointError(f"{chosen.path} does not fit this job, nothing was loaded", ours)
    cold = decide_cold(manifest, routes, wanted.on_route_change)
    state.load(reader_of(Reader(chosen.path, manifest), cold))
    return cold


def reader_of(reader: Reader, cold: Mapping[str, str]) -> Callable[[dmuon.StatePart], torch.Tensor | None]:
    """Return what reads a part's values from a checkpoint, and None for state that starts anew."""

    def read(part: dmuon.StatePart) -> torch.Tensor | None:
        if part.kind != _WEIGHT and part.name in cold:
            return None
        entry = reader.find(part.kind, part.names)
        assert entry is not None, f"{part.kind} of {part.name} was compared before"
        return reader.read(entry, part.start, part.stop)

    return read
