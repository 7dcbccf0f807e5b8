"""From text to tokens: raw bytes, or a tokenizer that transformers loads from disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worker.contract.errors import FieldError, PlanRefused

__all__ = ["BytesTokenizer", "Tokenizer", "load_tokenizer"]

Tokens = NDArray[np.uint8] | NDArray[np.uint32]


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    @property
    def identity(self) -> str:
        """Text that differs between tokenizers which encode differently; part of the cache key."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    def encode_document(self, document: bytes) -> Tokens:
        """Return the tokens of one document, its end mark included."""


@dataclass(frozen=True, slots=True)
class BytesTokenizer:
    """Every byte is a token; documents end in a zero byte, which text does not contain."""

    identity: str = "bytes"
    vocab_size: int = 256

    def encode_document(self, document: bytes) -> Tokens:
        """Return ``document`` as uint8, with a zero byte after it."""
        return np.frombuffer(document + b"\0", dtype=np.uint8)


class _DiskTokenizer:
    """A tokenizer from a directory; invalid UTF-8 is replaced, documents end in its end-of-text token."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        newest = max((file.stat().st_mtime_ns for file in directory.iterdir()), default=0)
        self.identity = f"{directory.resolve()}:{newest}"
        self.vocab_size = len(self._tokenizer)

    def encode_document(self, document: bytes) -> Tokens:
        text = document.decode("utf-8", errors="replace")
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return np.asarray([*ids, *([] if end is None else [end])], dtype=np.uint32)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of ``/data/tokenizer``.

    Raises:
        PlanRefused: there is no such directory, or transformers cannot read it.
    """
    if name == "bytes":
        return BytesTokenizer()
    directory = Path(name)
    if not os.path.isdir(directory):  # False, too, for a name that no system takes
        raise _refused(f"found {name!r}, which is no directory", "Write 'bytes', or a directory with a tokenizer.")
    try:
        return _DiskTokenizer(directory)
    except Exception as error:  # transformers raises whatever its parsers raise
        problem = f"transformers cannot load a tokenizer from {name!r}: {type(error).__name__}: {error}"
        raise _refused(problem, "Save it there with tokenizer.save_pretrained.") from error


def _refused(message: str, suggestion: str) -> PlanRefused:
    return PlanRefused(
        [FieldError(pointer="/data/tokenizer", code="bad_tokenizer", message=message, suggestion=suggestion)]
    )
