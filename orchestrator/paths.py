"""Paths in a spec: no way out of the places that the operator has opened."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.errors import SpecInvalidProblem
from worker.contract.errors import FieldError
from worker.contract.spec import JobSpec

__all__ = ["check_paths"]


def check_paths(spec: JobSpec, roots: Sequence[Path]) -> None:
    """Refuse a spec with a path that climbs (``..``) or, if there are ``roots``, lies in none of them.

    Symbolic links count as what they point to where this machine sees them.

    Raises:
        SpecInvalidProblem: with every such path.
    """
    allowed = [os.path.realpath(root) for root in roots]
    errors = [error for pointer, path in _paths(spec) if (error := _wrong(pointer, path, allowed)) is not None]
    if errors:
        raise SpecInvalidProblem(f"{len(errors)} path(s) of the spec may not be used: see errors", errors)


def _paths(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield (pointer, path) of every path that a spec can hold."""
    if spec.model.path is not None:
        yield "/model/path", spec.model.path
    for index, pattern in enumerate(spec.data.files or ()):
        yield f"/data/files/{index}", pattern
    if spec.data.directory is not None:
        yield "/data/directory", spec.data.directory
    if spec.data.tokenizer != "bytes":
        yield "/data/tokenizer", spec.data.tokenizer
    if spec.checkpoint.directory is not None:
        yield "/checkpoint/directory", spec.checkpoint.directory
    if spec.checkpoint.resume not in ("auto", "never"):
        yield "/checkpoint/resume", spec.checkpoint.resume


def _wrong(pointer: str, path: str, allowed: Sequence[str]) -> FieldError | None:
    if "\0" in path or ".." in path.split("/"):
        cure = "Write the path that is meant, from the root on."
        message = f"{path!r} climbs out with '..'"
        return FieldError(pointer=pointer, code="path_climbs", message=message, suggestion=cure)
    if not allowed:
        return None
    real = os.path.realpath(path)
    if path.startswith("/") and any(real == root or real.startswith(root.rstrip("/") + "/") for root in allowed):
        return None
    message = f"{path!r} lies in none of the places that this service may use: {', '.join(allowed)}"
    cure = "Put it there, or have the place added to DMUON_PATH_ROOTS."
    return FieldError(pointer=pointer, code="path_outside", message=message, suggestion=cure)
