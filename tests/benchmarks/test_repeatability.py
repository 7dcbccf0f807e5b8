"""The benchmark of repeatability finds a difference of one bit, and a CPU makes none."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common import open_grid
from benchmarks.repeatability import PAIRS, compare, train
from benchmarks.workloads import WORKLOADS
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import device_type


def test_a_pair_is_compared_to_the_last_bit() -> None:
    losses = {"one": [2.0, 1.0, 0.5], "same": [2.0, 1.0, 0.5], "other": [2.0, 1.0 + 2**-52, 0.25]}
    assert compare("one", "same", losses).first_difference is None
    pair = compare("one", "other", losses)
    assert pair.first_difference == 2
    assert pair.relative == pytest.approx({1: 0.0, 2: 2**-52})


def _runs() -> dict[str, list[float]]:
    device = torch.device(device_type())
    grid = open_grid(device, 1)
    names = dict.fromkeys(name for pair in PAIRS for name in pair)
    return {name: train(name, WORKLOADS["tiny"], grid, device, 4) for name in names}


@pytest.mark.multiproc
def test_a_cpu_repeats_a_run_and_shows_another_form() -> None:
    (losses,) = run_ranks(1, _runs)
    found = [compare(one, other, losses).first_difference for one, other in PAIRS]
    assert found[:2] == [None, None], "twice the same training"
    assert found[2] is not None and found[2] > 1, "the first loss comes before any update; then the form shows"
