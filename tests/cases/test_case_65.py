"""Case 65. Symptom elsewhere: ids of collected objects are reused, and a cache takes a new model for an old one."""

from __future__ import annotations

import gc

import torch

from tests.cases.common import Weights, dedicate, train

ROUNDS = 200


def test_new_models_are_never_taken_for_old_ones(one_rank: None) -> None:
    """Build, train, delete, collect, and again; every round gives the same weights, and nothing says "already"."""
    gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = set()
    gc.freeze()  # what is there already is not looked through 200 times
    for _ in range(ROUNDS):
        model = Weights({"weight": (4, 4)})
        optimizer = dedicate(model)
        train(model, optimizer, {"weight": gradient})
        results.add(float(optimizer.pieces[0].master.sum()))
        del model, optimizer
        gc.collect()
    gc.unfreeze()
    assert len(results) == 1
