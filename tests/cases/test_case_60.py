"""Case 60. Symptom elsewhere: an overridden method renames a parameter, and a caller by keyword fails."""

from __future__ import annotations

import inspect

import pytest
import torch

import dmuon_runtime as dmuon
from dmuon_runtime.baselines import WholeMatrixMuon

OVERRIDDEN = [
    (kind, name)
    for kind in (dmuon.Muon, dmuon.MuonAdamW, WholeMatrixMuon)
    for name, value in vars(kind).items()
    if inspect.isfunction(value) and not name.startswith("_") and hasattr(torch.optim.Optimizer, name)
]


def test_there_is_something_to_compare() -> None:
    assert {(dmuon.Muon, "step"), (dmuon.Muon, "zero_grad"), (dmuon.MuonAdamW, "load_state_dict")} <= set(OVERRIDDEN)


@pytest.mark.parametrize(("overriding", "name"), OVERRIDDEN)
def test_signatures_are_those_of_the_base(overriding: type[torch.optim.Optimizer], name: str) -> None:
    """Names, kinds and defaults; found by looking, not by a list."""
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(getattr(kind, name)).parameters.values()]
        for kind in (overriding, torch.optim.Optimizer)
    )
    assert ours == theirs
