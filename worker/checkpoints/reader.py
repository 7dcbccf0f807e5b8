"""Reading of parts: from whatever files and ranges a checkpoint has to whatever range is asked for, and no more."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from worker.checkpoints.manifest import Manifest, TensorEntry, part_key
from worker.checkpoints.state import DTYPES
from worker.checkpoints.tensor_file import Stored, read_header

__all__ = ["Reader"]


class Reader:
    """Reads one checkpoint; files are mapped when they are first needed."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._manifest = path, manifest
        self._entries = {(entry.kind, name): entry for entry in manifest.tensors for name in entry.names}
        self._open: dict[int, tuple[mmap.mmap, dict[str, Stored]]] = {}

    def find(self, kind: str, names: tuple[str, ...]) -> TensorEntry | None:
        """Return the tensor that has one of ``names``."""
        found = (self._entries.get((kind, name)) for name in names)
        return next((entry for entry in found if entry is not None), None)

    def read(self, entry: TensorEntry, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a flattened tensor, in the dtype in which they are stored."""
        values = torch.empty(stop - start, dtype=DTYPES[entry.dtype])
        for part in entry.parts:
            begin, end = max(start, part.start), min(stop, part.stop)
            if begin < end:
                mapped, header = self._file(part.file)
                stored = header[part_key(entry.kind, entry.names[0], part.start)]
                size = values.element_size()
                source = torch.frombuffer(
                    mapped, dtype=values.dtype, count=end - begin, offset=stored.begin + (begin - part.start) * size
                )
                values[begin - start : end - start] = source
        return values

    def whole(self, entry: TensorEntry) -> Tensor:
        """Return all of a tensor, in its shape."""
        return self.read(entry, 0, entry.elements).view(entry.shape)

    def _file(self, index: int) -> tuple[mmap.mmap, dict[str, Stored]]:
        if index not in self._open:
            path = self._path / self._manifest.files[index].name
            descriptor = os.open(path, os.O_RDONLY)
            try:  # private: torch wants memory that it could write to
                mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(descriptor)
            self._open[index] = (mapped, read_header(path))
        return self._open[index]
