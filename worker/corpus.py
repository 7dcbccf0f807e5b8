"""The text to train on: which files, and their tokens as one array in memory that all workers of a machine share."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from worker.contract.errors import FieldError, PlanRefused
from worker.contract.plan import DataPlan
from worker.contract.spec import DataSpec
from worker.tokenizer import Tokenizer, Tokens, load_tokenizer

__all__ = ["Corpus", "find_files", "load_corpus"]

_SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"})
"""Parts of a standard library's directory that are not its text: installed packages, tests, caches."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all documents, one after the other. A sample is ``sequence_length`` tokens and the one after them."""

    tokens: Tokens
    source: str
    num_files: int
    sequence_length: int
    vocab_size: int

    @property
    def num_samples(self) -> int:
        """Samples of an epoch; they overlap in one token."""
        return (len(self.tokens) - 1) // self.sequence_length

    @property
    def fingerprint(self) -> str:
        """Differs between corpora that differ: length and a hash of 64 evenly spaced windows."""
        digest = hashlib.sha256(f"{len(self.tokens)}:{self.sequence_length}:{self.tokens.dtype}".encode())
        for start in np.linspace(0, max(len(self.tokens) - 256, 0), 64, dtype=np.int64):
            digest.update(self.tokens[start : start + 256].tobytes())
        return digest.hexdigest()[:16]

    def plan(self) -> DataPlan:
        """Return what the plan says of it."""
        return DataPlan(
            source=self.source, files=self.num_files, tokens=len(self.tokens), samples_per_epoch=self.num_samples
        )


def find_files(data: DataSpec) -> tuple[list[Path], str]:
    """Return the files in the order in which they are read, and where they came from.

    Raises:
        PlanRefused: a pattern or directory that holds no file, or a file that cannot be read.
    """
    if data.files is not None:
        return _matching(data.files), "files " + ", ".join(data.files)
    if data.directory is not None:
        return _below(Path(data.directory)), f"directory {data.directory}"
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not _SKIPPED_DIRECTORIES & set(path.relative_to(root).parts)]
    return sorted(path for path in files if path.is_file()), "standard library of the running Python"


def load_corpus(data: DataSpec, cache_directory: Path) -> Corpus:
    """Read, encode and check the corpus.

    Raises:
        PlanRefused: files or tokenizer are missing, or the text is too short for one sample.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    files, source = find_files(data)
    tokens = _cached_tokens(files, tokenizer, cache_directory)
    pointer = _source_pointer(data)
    if all(path.stat().st_size == 0 for path in files):
        message = f"the {len(files)} files of {source} hold no text"
        raise PlanRefused([FieldError(pointer=pointer, code="empty_corpus", message=message)])
    corpus = Corpus(tokens, source, len(files), data.sequence_length, tokenizer.vocab_size)
    if corpus.num_samples < 1:
        raise PlanRefused(
            [
                FieldError(
                    pointer="/data/sequence_length",
                    code="sequence_too_long",
                    message=f"found {data.sequence_length}, but the corpus ({source}) has {len(tokens)} tokens and a "
                    f"sample needs {data.sequence_length + 1}",
                    suggestion=f"Use at most {len(tokens) - 1}, or add text.",
                )
            ]
        )
    return corpus


def _source_pointer(data: DataSpec) -> str:
    if data.files is not None:
        return "/data/files"
    return "/data" if data.directory is None else "/data/directory"


def _matching(patterns: Sequence[str]) -> list[Path]:
    found: dict[Path, None] = {}
    errors: list[FieldError] = []
    for index, pattern in enumerate(patterns):
        files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(name)]
        found.update(dict.fromkeys(files))
        if not files:
            errors.append(_no_match(f"/data/files/{index}", pattern))
    return _readable(list(found), "/data/files", errors)


def _no_match(pointer: str, pattern: str) -> FieldError:
    if os.path.isdir(pattern):
        message = f"{pattern!r} is a directory, and files takes patterns of files"
        cure = f"Use data.directory: {pattern}, which reads all files below it."
    else:
        message = f"no file matches {pattern!r} (looked from {os.getcwd()})"
        cure = "Write an absolute path; '**' crosses directories."
    return FieldError(pointer=pointer, code="missing_path", message=message, suggestion=cure)


def _below(directory: Path) -> list[Path]:
    # Not the methods of Path: they raise for a name that is too long, or a place that may not be looked at.
    exists = os.path.isdir(directory)
    files = sorted(path for path in directory.rglob("*") if os.path.isfile(path)) if exists else []
    errors = []
    if not files:
        problem = "holds no file" if exists else "is no directory"
        message = f"{str(directory)!r} {problem} (looked from {os.getcwd()})"
        errors.append(FieldError(pointer="/data/directory", code="missing_path", message=message))
    return _readable(files, "/data/directory", errors)


def _readable(files: list[Path], pointer: str, errors: list[FieldError]) -> list[Path]:
    for path in files:
        if not os.access(path, os.R_OK):
            message = f"{str(path)!r} cannot be read by this user"
            errors.append(FieldError(pointer=pointer, code="unreadable_path", message=message))
    if errors:
        raise PlanRefused(errors)
    return files


def _cached_tokens(files: Sequence[Path], tokenizer: Tokenizer, cache_directory: Path) -> Tokens:
    """Return the tokens, mapped from a file that is written once for these files and this tokenizer."""
    key = hashlib.sha256(tokenizer.identity.encode())
    for path in files:
        stat = path.stat()
        key.update(os.fsencode(path.resolve()) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    cached = cache_directory / f"tokens-{key.hexdigest()[:32]}.npy"
    if not _own_directory(cache_directory):
        return _encode(files, tokenizer)
    if not cached.is_file():
        partial = cached.with_suffix(f".{os.getpid()}.partial.npy")
        np.save(partial, _encode(files, tokenizer))
        os.replace(partial, cached)
    tokens: Tokens = np.load(cached, mmap_mode="r", allow_pickle=False)
    return tokens


def _own_directory(directory: Path) -> bool:
    """Make the directory; False where it cannot be made or is another user's, whose files are not to be trusted."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK)
    except OSError:
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:  # it is there and may be read, and yet: a broken disk, a special file, one gone meanwhile
        message = f"{str(path)!r} cannot be read: {error.strerror}"
        cure = "Name files of text."
        refused = FieldError(pointer="/data", code="unreadable_path", message=message, suggestion=cure)
        raise PlanRefused([refused]) from error


def _encode(files: Sequence[Path], tokenizer: Tokenizer) -> Tokens:
    parts = [tokenizer.encode_document(_read(path)) for path in files]
    if not parts:
        return np.zeros(0, dtype=np.uint8)
    return cast("Tokens", np.concatenate(parts))
