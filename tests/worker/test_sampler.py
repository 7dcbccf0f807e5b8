"""The same text for the same (seed, step, position), whatever the number of workers."""

from __future__ import annotations

import pytest

from worker.sampler import permuted, sample_index, worker_positions


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
def test_an_epoch_is_a_permutation(size: int) -> None:
    assert sorted(permuted(index, size, b"key") for index in range(size)) == list(range(size))


def test_every_epoch_visits_all_samples_in_another_order() -> None:
    num_samples, batch = 60, 12
    epochs = [
        [sample_index(7, step, position, batch, num_samples) for step in steps for position in range(batch)]
        for steps in (range(5), range(5, 10))
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(num_samples))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_seeds_differ() -> None:
    orders = [[sample_index(seed, 0, position, 50, 50) for position in range(50)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_workers_share_the_batch_without_gap_or_overlap() -> None:
    for world_size in (1, 2, 3, 4):
        shares = [worker_positions(rank, world_size, 12) for rank in range(world_size)]
        assert [position for share in shares for position in share] == list(range(12))


def test_a_batch_may_hold_several_epochs() -> None:
    assert sorted(sample_index(0, 0, position, 6, 3) for position in range(6)) == [0, 0, 1, 1, 2, 2]


def test_a_change_of_workers_repeats_and_skips_nothing() -> None:
    """Steps done by 1, 3, 2 and 4 workers read, in order, what one worker reads without a break."""
    batch, num_samples = 12, 50

    def read(step: int, world_size: int) -> list[int]:
        shares = [worker_positions(rank, world_size, batch) for rank in range(world_size)]
        return [sample_index(5, step, position, batch, num_samples) for share in shares for position in share]

    assert [read(step, size) for step, size in enumerate((1, 3, 2, 4, 4, 1))] == [read(step, 1) for step in range(6)]
    seen = [sample for step in range(4) for sample in read(step, 3)]
    assert len(set(seen)) == len(seen) == 48, "no sample twice in an epoch"
