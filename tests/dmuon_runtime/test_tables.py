"""Tables of one launch over many tensors: everything is in them once, and they stay while nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon_runtime import updates
from dmuon_runtime._tables import Table, tables

BLOCK = 64


def _programs(size: int) -> int:
    return -(-size // BLOCK)


def _random(sizes: Sequence[int], dtype: torch.dtype = torch.float32, offset: int = 0) -> list[Tensor]:
    return [torch.randn(size + offset).to(dtype)[offset:] for size in sizes]


def _contents(table: Table) -> list[list[int]]:
    rows: list[list[int]] = table.rows.tolist()
    return rows


def test_every_tensor_is_in_one_row_and_every_block_has_a_program() -> None:
    sizes = (128, 0, 65, 16, 1)
    first = [*_random(sizes), *_random((64, 64), torch.bfloat16), *_random((64,), offset=1)]
    second = [torch.randn(x.shape) for x in first]
    numbers = [0.5 + place for place in range(len(first))]
    found = list(tables((first, second), _programs, numbers=numbers))
    assert sorted(member for table in found for member in table.members) == [0, 2, 3, 4, 5, 6, 7]
    assert len(found) == 3, "aligned, not aligned, another dtype"
    for table in found:
        expected = [first[member].numel() for member in table.members]
        assert table.rows[:, 0].tolist() == expected
        assert table.rows[:, 1].view(torch.float64).tolist() == [numbers[member] for member in table.members]
        for place, column in enumerate((first, second)):
            assert table.rows[:, 2 + place].tolist() == [column[member].data_ptr() for member in table.members]
            assert {column[member].dtype for member in table.members} == {table.dtypes[place]}
        assert table.num_programs == [_programs(size) for size in expected]
        work = [[tensor, block] for tensor, size in enumerate(expected) for block in range(_programs(size))]
        assert table.work.tolist() == work
        multiples = all(value % 16 == 0 for row in table.rows[:, [0, 2, 3]].tolist() for value in row)
        assert table.is_aligned == multiples


def test_batches_are_cut_matrix_by_matrix() -> None:
    [table] = tables((_random((3 * 80, 80)),), _programs, counts=[3, 1])
    assert table.rows[:, 0].tolist() == [80, 80]
    assert table.work.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [0, 5], [1, 0], [1, 1]]


def test_what_has_not_moved_is_not_made_anew() -> None:
    first, second = _random((64, 128)), _random((64, 128))
    [before], [after] = (list(tables((first, second), _programs)) for _ in range(2))
    assert before.rows.data_ptr() == after.rows.data_ptr() and before.work is after.work
    moved = [first[0].clone(), first[1]]
    [other] = tables((moved, second), _programs)
    assert other.work is before.work and _contents(other) != _contents(before)
    assert _contents(before)[0][2] == first[0].data_ptr(), "what is in use is not written to"


def test_runs_of_tensors_are_one_by_one_bit_by_bit() -> None:
    """On a CPU small tensors go to torch together, large ones alone, and none together with another dtype."""
    torch.manual_seed(0)
    large = updates.CACHED_ELEMENTS
    sizes = (100, 300, large, 50, large // 2, large // 2, large // 2, 0, 7)
    buffers, gradients = [*_random(sizes), *_random((9, 9), torch.bfloat16)], _random((*sizes, 9, 9))
    runs = [list(range(len(buffers)))[run] for run in updates._runs(buffers, gradients)]
    assert runs == [[0, 1], [2], [3, 4], [5, 6, 7], [8], [9, 10]]
    for gate in (None, torch.ones(()), torch.zeros(())):
        ours, theirs = ([x.clone() for x in buffers] for _ in range(2))
        ahead = updates.momentum_updates(ours, gradients, 0.9, True, gate)
        squares = updates.apply_changes(ours, gradients, [0.3] * len(ours), 0.1, 0.01, gate)
        for index, buffer in enumerate(theirs):
            [one] = updates.momentum_updates([buffer], [gradients[index]], 0.9, True, gate)
            [square] = updates.apply_changes([buffer], [gradients[index]], [0.3], 0.1, 0.01, gate)
            assert torch.equal(one, ahead[index]) and torch.equal(square, squares[index])
            assert torch.equal(buffer, ours[index])
            assert torch.equal(buffer, buffers[index]) == (buffer.numel() == 0 or (gate is not None and gate == 0))
