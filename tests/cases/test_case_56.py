"""Case 56. Symptom elsewhere: decay is computed and not applied, and a loose tolerance hides it."""

from __future__ import annotations

import pytest
import torch

from tests.cases.common import Weights, dedicate, masters, train

SHAPES = {"square": (4, 4), "tall": (4096, 2), "bias": (5,), "table": (7, 2)}
ROUTES: list[dict[str, object]] = [
    {"name": "bias", "set": {"route": "adamw"}}, {"name": "table", "set": {"route": "sharded_adamw"}}
]  # fmt: skip


@pytest.mark.parametrize("decay", [0.1, 10.0, 0.0])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_decay_uses_the_base_rate_once_a_step(one_rank: None, decay: float, scale: str) -> None:
    """No gradient to speak of, weights of 1, rate 0.1: ``1 - 0.1 decay`` to the last bit, tall shapes too."""
    model = Weights(SHAPES, torch.float32)
    settings = {"lr": 0.1, "weight_decay": decay, "adamw_lr": 0.1, "adamw_weight_decay": decay}
    optimizer = dedicate(model, ROUTES, scale=scale, ns_backend="gram", **settings)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    expected = torch.ones(())
    for _ in range(2):
        train(model, optimizer, zeros)
        expected = expected * (1 - 0.1 * decay)
        for name, value in masters(optimizer).items():
            assert torch.equal(value, expected.expand_as(value)), name
