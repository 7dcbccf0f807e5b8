"""One file of named flat tensors in the safetensors layout, written in one pass: hashed, synced, without a second copy.

The layout: eight bytes with the length of a JSON header, the header (dtype, shape and byte range of each name), the
bytes. See https://huggingface.co/docs/safetensors. Any reader of safetensors opens these files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from worker.checkpoints.errors import CheckpointError

__all__ = ["DTYPE_BYTES", "FlatTensor", "Stored", "hash_file", "read_header", "write_tensors"]

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F64": 8,
}  # fmt: skip
"""Element sizes by the format's names of dtypes."""
_CHUNK_BYTES = 1 << 24
_MAX_HEADER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """The bytes of a tensor [elements] under a name that the file has once."""

    key: str
    dtype: str
    elements: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a file keeps a tensor: bytes [begin, end) of the file."""

    dtype: str
    elements: int
    begin: int
    end: int


def write_tensors(path: Path, tensors: Sequence[FlatTensor], midway: Callable[[], None]) -> tuple[int, str]:
    """Write ``tensors``, sync the file, and return its size in bytes and its SHA-256.

    Args:
        midway: called when half of the bytes are written.
    """
    header: dict[str, object] = {}
    total = 0
    for tensor in tensors:
        header[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": [tensor.elements],
            "data_offsets": [total, total + tensor.data.nbytes],
        }
        total += tensor.data.nbytes
    assert len(header) == len(tensors), "a name stands twice"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with open(path, "xb") as file:
        chunks: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text, *_chunks(tensors)]
        for chunk in chunks:
            if written < total // 2 <= written + len(chunk):
                midway()
            file.write(chunk)
            digest.update(chunk)
            written += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return written, digest.hexdigest()


def _chunks(tensors: Sequence[FlatTensor]) -> list[memoryview]:
    parts = [tensor.data.cast("B") for tensor in tensors if tensor.elements]
    return [part[begin : begin + _CHUNK_BYTES] for part in parts for begin in range(0, part.nbytes, _CHUNK_BYTES)]


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_header(path: Path) -> dict[str, Stored]:
    """Return what a file holds, by name.

    Raises:
        CheckpointError: the file is no such file, or its header and its size disagree.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path.name} begins with no header: {size} bytes, a header of {length}")
        text = file.read(length)
    try:
        found = {key: _stored(entry, 8 + length) for key, entry in json.loads(text).items() if key != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of {path.name} cannot be read: {error}") from error
    wrong = [
        f"{key}: bytes {entry.begin} to {entry.end} of {size} for {entry.elements} {entry.dtype}"
        for key, entry in found.items()
        if not 0 <= entry.begin <= entry.end <= size
        or entry.end - entry.begin != entry.elements * DTYPE_BYTES.get(entry.dtype, -1)
    ]
    if wrong:
        raise CheckpointError(f"the header of {path.name} does not fit its contents", wrong)
    return found


def _stored(entry: Mapping[str, list[int]], base: int) -> Stored:
    elements = 1
    for length in entry["shape"]:
        elements *= length
    begin, end = entry["data_offsets"]
    return Stored(str(entry["dtype"]), elements, base + begin, base + end)
