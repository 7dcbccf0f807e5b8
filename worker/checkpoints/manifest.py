"""The manifest of a checkpoint: what it holds, where, of which run, and hashes that make every lie show.

It is written last, so a directory with a sound manifest whose files have the sizes it names is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.tensor_file import DTYPE_BYTES

__all__ = [
    "FORMAT_VERSION", "DataPosition", "FileEntry", "KernelRecord", "LaunchCount", "Manifest", "PartEntry", "RunRecord",
    "TensorEntry", "part_key",
]  # fmt: skip

FORMAT_VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Record):
    """One file of the checkpoint."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class PartEntry(_Record):
    """Elements [start, stop) of a flattened tensor, in one file."""

    file: int = Field(ge=0)
    """Index into the manifest's files."""
    start: int = Field(ge=0)
    stop: int = Field(ge=0)


class TensorEntry(_Record):
    """One whole tensor."""

    kind: str
    """``weight``, or the optimizer's word for a slot of its state."""
    names: tuple[str, ...] = Field(min_length=1)
    """All names of the tensor in the model; more than one when it is tied."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it, such as ``F32``."""
    parts: tuple[PartEntry, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class DataPosition(_Record):
    """How far the data were read: order and position are pure functions of these."""

    fingerprint: str
    seed: int
    sequence_length: int
    global_batch: int
    samples: int
    """Samples that all ranks have read together since the first step."""


class LaunchCount(_Record):
    """What one kernel did up to the checkpoint, in the attempt that wrote it, summed over ranks."""

    kernel: str
    algorithm: str
    launches: int
    matrices: int


class KernelRecord(_Record):
    """Where the numbers come from: what was asked for (None with a baseline), and what was launched."""

    configured: str | None = None
    algorithm: str | None = None
    coefficients: str | None = None
    epoch: int | None = None
    launched: tuple[LaunchCount, ...] = ()
    device: str
    torch: str


class RunRecord(_Record):
    """The run that wrote the checkpoint."""

    spec_json: str
    spec_digest: str
    plan_hash: str
    optimizer: str
    world_size: int
    mesh: dict[str, int]
    routes: dict[str, str]
    """The route of every parameter that trained, by its first name."""
    vocab_size: int
    first_step: int
    """Step at which the attempt that wrote it began; counts of launches begin there."""
    rng: Literal["seed, step, rank"] = "seed, step, rank"
    """Random numbers of a step depend on these alone, so no state of a generator is kept."""


class Manifest(_Record):
    """Everything of one checkpoint but the tensors themselves."""

    format_version: int
    step: int = Field(ge=0)
    """Optimizer steps that are done."""
    sequence: int = Field(ge=1)
    """Counts the checkpoints of a directory in the order in which they were written: the highest is the newest."""
    created_at: float
    run: RunRecord
    data: DataPosition
    kernels: KernelRecord
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(entry.num_bytes for entry in self.files)

    def dump(self) -> bytes:
        """Return the JSON text, with its own digest."""
        body = self.model_dump_json()
        return json.dumps({"sha256": _digest(body), "manifest": body}).encode()

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """Return the manifest of a text that :meth:`dump` wrote.

        Raises:
            CheckpointError: it was changed or cut, is of another format version, or contradicts itself.
        """
        try:
            document = json.loads(text)
            body, digest = document["manifest"], document["sha256"]
            if _digest(body) != digest:
                raise CheckpointError("the manifest does not have the hash that it names: it was changed or damaged")
            version = json.loads(body).get("format_version")
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"it is in format version {version!r}, this code reads version {FORMAT_VERSION}; use the version "
                    "of the code that wrote it"
                )
            found = cls.model_validate_json(body)
        except (ValidationError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the manifest cannot be read: {' '.join(str(error).split())}") from error
        problems = list(_contradictions(found))
        if problems:
            raise CheckpointError("the manifest contradicts itself", problems)
        return found


def part_key(kind: str, name: str, start: int) -> str:
    """Return the name of a part in its file."""
    return f"{kind}:{name}@{start}"


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _contradictions(manifest: Manifest) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    for entry in manifest.tensors:
        what = f"{entry.kind} of {entry.names[0]}"
        for name in entry.names:
            if (entry.kind, name) in seen:
                yield f"{entry.kind} of {name} stands twice"
            seen.add((entry.kind, name))
        if entry.dtype not in DTYPE_BYTES:
            yield f"{what} has the unknown dtype {entry.dtype}"
        if any(part.file >= len(manifest.files) for part in entry.parts):
            yield f"{what} names a file that there is not"
        place = 0
        for part in sorted(entry.parts, key=lambda part: (part.start, part.stop)):
            if part.start != place or part.stop < part.start:
                break
            place = part.stop
        if place != entry.elements or sum(part.stop - part.start for part in entry.parts) != entry.elements:
            yield f"the parts of {what} are not its {entry.elements} elements, each once"
