"""Every view of a parameter as matrices can be cut and put together again, and its shapes say what is cut."""

from __future__ import annotations

import pytest
import torch

from dmuon_runtime.matrices import MATRIX_VIEWS, MatrixShape, join_blocks, matrix_blocks, matrix_shapes

SHAPES = [(6, 4), (3, 6, 4), (2, 3, 6, 4), (6, 3, 2, 2), (5,), ()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("view", [None, *MATRIX_VIEWS])
def test_blocks_and_shapes_agree_and_join(shape: tuple[int, ...], view: str | None) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    rows = matrix_shapes(shape, view, ())[0].rows
    for split in ((), (rows,), (1, rows - 1) if rows > 1 else ()):
        blocks = matrix_blocks(tensor, view, split)
        shapes = matrix_shapes(shape, view, split)
        assert [tuple(block.shape[-2:]) for block in blocks] == [(s.rows, s.columns) for s in shapes]
        assert sum(block.numel() for block in blocks) == tensor.numel()
        assert all(block.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for block in blocks)
        assert torch.equal(join_blocks(blocks, shape, view), tensor)


def test_rows_are_outputs_whatever_the_storage() -> None:
    """A fused query, key, value of 16 inputs and 8 + 2 + 2 outputs, stored both ways."""
    expected = (MatrixShape(1, 8, 16), MatrixShape(1, 2, 16), MatrixShape(1, 2, 16))
    assert matrix_shapes((12, 16), None, (8, 2, 2)) == expected
    assert matrix_shapes((16, 12), "transposed", (8, 2, 2)) == expected
    assert matrix_shapes((4, 16, 12), "experts_transposed", (6, 6)) == (MatrixShape(4, 6, 16), MatrixShape(4, 6, 16))
    assert matrix_shapes((4, 12, 16), "experts", (6, 6)) == (MatrixShape(4, 6, 16), MatrixShape(4, 6, 16))
    assert matrix_shapes((64, 3, 7, 7), "flatten", ()) == (MatrixShape(1, 64, 147),)
