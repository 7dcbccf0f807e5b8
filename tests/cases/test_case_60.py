"""Case 60. Symptom elsewhere: an overridden method renames a parameter, and a caller by keyword fails."""

from __future__ import annotations

import inspect

import pytest
import torch

import dmuon_runtime as dmuon

OVERRIDDEN = [
    name
    for name, value in vars(dmuon.Muon).items()
    if inspect.isfunction(value) and not name.startswith("_") and hasattr(torch.optim.Optimizer, name)
]


def test_there_is_something_to_compare() -> None:
    assert {"load_state_dict", "step", "zero_grad"} <= set(OVERRIDDEN)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_signatures_are_those_of_the_base(name: str) -> None:
    """Names, kinds and defaults; found by looking, not by a list."""
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(getattr(kind, name)).parameters.values()]
        for kind in (dmuon.Muon, torch.optim.Optimizer)
    )
    assert ours == theirs
