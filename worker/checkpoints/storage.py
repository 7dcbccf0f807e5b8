"""Directories of checkpoints: what is complete, what is newest, how one appears at once, and what is removed.

``step-00000010``           one checkpoint, whole: a manifest and the files that it names; copy it anywhere
``step-00000010.replaced``  an earlier one of the same step, while a new one takes its place
``.partial-…``              one that is being written
``.trash-…``                one that is being removed
``latest``                  name of the one that was written last, for people; nothing here relies on it

A checkpoint becomes one by the rename of its synced directory. Whatever was killed when, every directory that is found
under the first two names is whole, or was damaged by somebody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.manifest import Manifest, part_key
from worker.checkpoints.tensor_file import hash_file, read_header

__all__ = [
    "MANIFEST", "POINTER", "CheckpointInfo", "Fault", "commit", "discard", "find_checkpoints", "inspect",
    "lock_directory", "named_checkpoint", "newest_complete", "next_sequence", "no_fault", "partial_directory",
    "read_manifest", "sees_lock", "verify_files",
]  # fmt: skip

MANIFEST = "manifest.json"
POINTER = "latest"
_NAME = re.compile(r"step-(\d{8,19})(\.replaced)?")
_PARTIAL, _TRASH, _LOCK = ".partial-", ".trash-", ".lock"

Fault = Callable[[str], None]
"""Called at each point at which a process may die: ``write``, ``file``, ``rename``, ``pointer``, ``retention``."""


def no_fault(point: str) -> None:
    """Let everything go on."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A complete checkpoint. Its contents are not verified yet; its manifest and the sizes of its files are."""

    path: Path
    step: int
    """Optimizer steps that are done."""
    sequence: int
    """The higher, the later it was written in its directory."""
    num_bytes: int
    created_at: float
    """Seconds since the epoch."""


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: there is none, or it is not to be trusted.
    """
    try:
        return Manifest.parse((path / MANIFEST).read_bytes())
    except OSError as error:
        raise CheckpointError(f"there is no manifest in {path}: {error.strerror or error}") from error


def inspect(path: Path) -> CheckpointInfo:
    """Return what stands at ``path``, judged by its manifest and the sizes of its files.

    Raises:
        CheckpointError: it is no complete checkpoint; says why.
    """
    manifest = read_manifest(path)
    problems = [problem for entry in manifest.files if (problem := _size_problem(path / entry.name, entry.num_bytes))]
    if problems:
        raise CheckpointError(f"{path} is not complete", problems)
    return CheckpointInfo(path, manifest.step, manifest.sequence, manifest.num_bytes, manifest.created_at)


def _size_problem(file: Path, expected: int) -> str | None:
    try:
        size = file.stat().st_size
    except OSError as error:
        return f"{file.name}: {error.strerror or error}"
    return None if size == expected else f"{file.name} has {size} bytes, the manifest says {expected}"


def verify_files(path: Path, manifest: Manifest, share: int = 0, num_shares: int = 1) -> list[str]:
    """Read every ``num_shares``-th file from ``share`` on; return what is wrong with them, empty when nothing is."""
    problems: list[str] = []
    for index in range(share, len(manifest.files), num_shares):
        entry = manifest.files[index]
        file = path / entry.name
        problem = _size_problem(file, entry.num_bytes)
        try:
            if problem is None and hash_file(file) != entry.sha256:
                problem = f"{entry.name} does not have the hash of the manifest: it was changed or damaged"
            problems += [problem] if problem else _header_problems(file, manifest, index)
        except (OSError, CheckpointError) as error:
            problems.append(f"{entry.name}: {error}")
    return problems


def _header_problems(file: Path, manifest: Manifest, index: int) -> list[str]:
    header = read_header(file)
    problems = []
    for entry in manifest.tensors:
        for part in entry.parts:
            if part.file == index:
                stored = header.get(part_key(entry.kind, entry.names[0], part.start))
                if stored is None or (stored.dtype, stored.elements) != (entry.dtype, part.stop - part.start):
                    found = "nothing" if stored is None else f"{stored.elements} {stored.dtype}"
                    what = f"{entry.kind} of {entry.names[0]}"
                    problems.append(
                        f"{file.name} has {found} for {what}, the manifest {part.stop - part.start} {entry.dtype}"
                    )
    return problems


def find_checkpoints(directory: Path) -> tuple[list[CheckpointInfo], list[CheckpointError]]:
    """Return the complete checkpoints of a directory, newest first, and why each of the others is none.

    An absent directory holds nothing.
    """
    found: list[CheckpointInfo] = []
    broken: list[CheckpointError] = []
    for path in _named(directory):
        try:
            found.append(inspect(path))
        except CheckpointError as error:
            broken.append(error)
    return sorted(found, key=_age), broken


def _age(info: CheckpointInfo) -> tuple[int, bool]:
    return -info.sequence, info.path.suffix != ""


def _named(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def newest_complete(directory: Path) -> CheckpointInfo | None:
    """Return the complete checkpoint of ``directory`` that was written last; needs no torch."""
    found, _ = find_checkpoints(directory)
    return found[0] if found else None


def named_checkpoint(path: Path, parameter: str) -> Path:
    """Return the checkpoint that ``path`` names: itself, the newest complete one in it, or where ``latest`` points.

    Raises:
        CheckpointError: there is none; ``parameter`` is what the message calls it by.
    """
    if not path.exists():
        raise CheckpointError(f"{parameter}: there is nothing at {path}")
    if path.name == POINTER and path.is_file():
        path = path.with_name(path.read_text().strip())
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        return inspect(path).path
    complete, broken = find_checkpoints(path)
    if complete:
        return complete[0].path
    message = f"{parameter}: {path} is no checkpoint, and holds no complete one"
    if (path / "config.json").exists():
        message += "; it looks like a model of transformers, which model.path takes"
    raise CheckpointError(message, [str(error) for error in broken])


def next_sequence(directory: Path) -> int:
    """Return the sequence number of the next checkpoint in ``directory``."""
    newest = newest_complete(directory)
    return 1 if newest is None else newest.sequence + 1


def lock_directory(directory: Path, token: str) -> int:
    """Make ``directory`` and keep it for this process; returns the file descriptor that holds the lock.

    ``token`` is left in it, so that others can tell whether they see the same directory.

    Raises:
        CheckpointError: it cannot be written, or another run has it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        message = f"checkpoints cannot be written to {directory}: {error.strerror or error}"
        raise CheckpointError(f"{message}; name another checkpoint.directory, or make it writable") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        message = f"another run writes its checkpoints to {directory}; give each run a checkpoint.directory of its own"
        raise CheckpointError(message) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, token.encode(), 0)
    return descriptor


def sees_lock(directory: Path, token: str) -> bool:
    """Tell whether this process sees the directory that another one has locked with ``token``."""
    try:
        return (directory / _LOCK).read_text() == token
    except OSError:
        return False


def partial_directory(directory: Path, step: int, token: str) -> Path:
    """Return where the checkpoint of ``step`` is written before it is one; ``token`` tells attempts apart."""
    return directory / f"{_PARTIAL}{step:08d}-{token}"


def commit(partial: Path, manifest: Manifest, keep: int, fault: Fault = no_fault) -> Path:
    """Turn a directory whose files are written and synced into a checkpoint, and remove what is no longer kept.

    Returns the path of the checkpoint. Raises OSError when it cannot be done; what was complete before still is.
    """
    directory = partial.parent
    final = directory / f"step-{manifest.step:08d}"
    _write_synced(partial / MANIFEST, manifest.dump())
    _sync_directory(partial)
    fault("rename")
    aside = final.with_name(final.name + ".replaced")
    if final.exists():
        _remove(aside)
        os.rename(final, aside)
    os.rename(partial, final)
    _sync_directory(directory)
    fault("pointer")
    pointer = directory / f"{_PARTIAL}{POINTER}"
    pointer.unlink(missing_ok=True)
    _write_synced(pointer, final.name.encode())
    os.replace(pointer, directory / POINTER)
    _sync_directory(directory)
    _retain(directory, keep, fault)
    return final


def _retain(directory: Path, keep: int, fault: Fault) -> None:
    """Remove complete checkpoints beyond the ``keep`` newest, and remnants. Broken ones are left for people to see."""
    assert keep >= 1, "the last good one stays"
    found, _ = find_checkpoints(directory)
    whole = {info.path for info in found}
    kept = [info.path for info in found if info.path.suffix == "" or info.path.with_suffix("") not in whole][:keep]
    for info in found:
        if info.path not in kept:
            _remove(info.path, fault)
    for path in directory.iterdir():
        if path.name.startswith((_PARTIAL, _TRASH)):
            _remove(path)


def _remove(path: Path, fault: Fault = no_fault) -> None:
    """Remove a directory so that no half of it is ever seen under its name."""
    if not path.exists():
        return
    doomed = path
    if not path.name.startswith(_TRASH):
        doomed = path.with_name(_TRASH + path.name.lstrip("."))
        if doomed.exists():
            shutil.rmtree(doomed)
        os.rename(path, doomed)
    fault("retention")
    if doomed.is_dir():
        shutil.rmtree(doomed)
    else:
        doomed.unlink()


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove what a failed save left behind, as far as that can be done: the next save tries again."""
    with contextlib.suppress(OSError):
        _remove(path)
