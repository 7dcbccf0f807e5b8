"""Tables that let one launch work on many tensors: where they lie, how large they are, and who does what.

A program of such a launch does a part of one tensor. ``work`` names both, ``rows`` says the rest; they lie on the
device. They are made from pinned memory, which no host waits for, and kept while sizes and addresses are the same as
in a step before: allocators come back to the same addresses.

T tensors, C columns (tensors of one element-wise operation), P programs.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "DTYPES", "Table", "tables"]

ALIGNMENT: Final = 16
"""Bytes, and elements: where all addresses and sizes are multiples of it, memory is read in words of this size."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels that take tables compute with."""


@dataclass(frozen=True, slots=True)
class Table:
    """Tensors that have equal dtypes in each column, on one device."""

    members: list[int]
    """Their indices in what the table was made from."""
    rows: Tensor
    """int64 [T, 2 + C]: elements of a matrix, the bits of a float64 number, addresses."""
    work: Tensor
    """int32 [P, 2]: of each program its tensor (among the members), and which of the tensor's programs it is."""
    num_programs: list[int]
    """Of each tensor; they follow each other."""
    dtypes: tuple[torch.dtype, ...]
    """Of each column."""
    is_aligned: bool

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.rows.device


def tables(
    columns: Sequence[Sequence[Tensor]],
    programs: Callable[[int], int],
    *,
    numbers: Sequence[float] | None = None,
    counts: Sequence[int] | None = None,
) -> Iterator[Table]:
    """Yield the fewest tables in which each tensor of the columns is once; none for what has no elements.

    Args:
        columns: C lists of T contiguous tensors of :data:`DTYPES`; those of the first column have the sizes that count.
        programs: how many do a matrix of so many elements.
        numbers: a float64 number for each tensor; None: zeros.
        counts: matrices of equal size in each tensor; None: one.
    """
    bits = array("q", array("d", numbers).tobytes()).tolist() if numbers is not None else [0] * len(columns[0])
    kinds: defaultdict[tuple[torch.device, tuple[torch.dtype, ...], bool], list[int]] = defaultdict(list)
    rows: list[tuple[int, ...]] = []
    num_programs: list[int] = []
    for index, tensors in enumerate(zip(*columns, strict=True)):
        count = 1 if counts is None else counts[index]
        size, addresses = tensors[0].numel() // count, [x.data_ptr() for x in tensors]
        rows.append((size, bits[index], *addresses))
        num_programs.append(count * programs(size))
        if size:
            is_aligned = size % ALIGNMENT == 0 and not any(address % ALIGNMENT for address in addresses)
            kinds[tensors[0].device, tuple([x.dtype for x in tensors]), is_aligned].append(index)
    for (device, dtypes, is_aligned), members in kinds.items():
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        found = _rows(tuple(chain.from_iterable(rows[index] for index in members)), device, stream)
        each = [num_programs[index] for index in members]
        yield Table(members, found.view(len(members), -1), _work(tuple(each), device, stream), each, dtypes, is_aligned)


@lru_cache(maxsize=1024)
def _rows(values: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return ``values``, int64, on ``device``; by stream, since what is read on another one might not be there yet."""
    return _on_device(torch.tensor(values, dtype=torch.int64), device)


@lru_cache(maxsize=64)
def _work(num_programs: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    each = torch.tensor(num_programs)
    tensor = torch.repeat_interleave(each)
    first = each.cumsum(0) - each
    place = torch.arange(len(tensor)) - first[tensor]
    return _on_device(torch.stack([tensor, place], dim=1).to(torch.int32), device)


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
