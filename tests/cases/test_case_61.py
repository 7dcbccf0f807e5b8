"""Case 61. Symptom elsewhere: the set of weights is captured while warming up; one that starts late never moves."""

from __future__ import annotations

import torch

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters, train

START = 4


def test_a_late_weight_is_updated_from_its_first_use_on(one_rank: None) -> None:
    """Muon and AdamW alike; its first update is a first update, with no decay or counting before."""
    shapes = {"early": (4, 4), "late": (4, 4), "late_bias": (4,)}
    routes: list[dict[str, object]] = [{"name": "bias", "set": {"route": "adamw"}}]
    model = Weights(shapes)
    optimizer = dedicate(model, routes, weight_decay=0.1)
    before, digest = masters(optimizer), dmuon.get_plan(model).hash
    gradients = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for step in range(START + 2):
        late = step >= START
        train(model, optimizer, gradients if late else {"early": gradients["early"]})
        moved = {name for name, value in masters(optimizer).items() if not torch.equal(value, before[name])}
        assert moved == (set(shapes) if late else {"early"})
        if step == START:
            first = Weights(shapes)
            fresh = dedicate(first, routes, weight_decay=0.1)
            train(first, fresh, gradients)
            expected = masters(fresh)
            assert all(torch.equal(masters(optimizer)[name], expected[name]) for name in ("late", "late_bias"))
    assert dmuon.get_plan(model).hash == digest
