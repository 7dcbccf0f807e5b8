"""How a Triton kernel reads a table, and how it is launched on one (:mod:`dmuon_runtime._tables`).

Addresses come out of a table as integers: a compiler knows nothing of their alignment but what it is told.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from dmuon_runtime._tables import Table

__all__ = ["address", "launch", "row_of", "size_of"]

_TRITON_DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit  # type: ignore[untyped-decorator]
def row_of(rows, work, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where the row of this program's tensor begins, and which of the tensor's programs this is (int64)."""
    tensor = tl.load(work + 2 * tl.program_id(0)).to(tl.int64)
    return rows + tensor * (2 + COLUMNS), tl.load(work + 2 * tl.program_id(0) + 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def size_of(row, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the elements of a matrix of this row's tensor."""
    size = tl.load(row)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return size


@triton.jit  # type: ignore[untyped-decorator]
def address(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where this row's tensor of a column begins."""
    begin = tl.load(row + 2 + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    return begin


def launch(kernel: Any, table: Table, *arguments: object, num_warps: int, **constants: object) -> None:
    """Launch ``kernel(rows, work, *arguments, *dtypes of the columns, ALIGNED, **constants)`` on a table."""
    dtypes = [_TRITON_DTYPES[dtype] for dtype in table.dtypes]
    with torch.cuda.device(table.device if table.device.type == "cuda" else -1):  # -1: Triton's interpreter, on a CPU
        kernel[(len(table.work),)](
            table.rows, table.work, *arguments, *dtypes, table.is_aligned, num_warps=num_warps, **constants
        )
