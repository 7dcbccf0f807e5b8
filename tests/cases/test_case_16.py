"""Case 16. Symptom elsewhere: a warm-up writes one rate into both groups, or never touches the second optimizer."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, train

SHAPES = {"weight": (4, 4), "bias": (4,)}
GRADIENTS = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
FACTORS = [0.25, 0.5, 0.75, 1.0, 0.9, 0.81]


def _factor(step: int) -> float:
    return (step + 1) / 4 if step < 4 else 0.9 ** (step - 3)


def _start() -> tuple[Weights, dmuon.Muon, LambdaLR]:
    model = Weights(SHAPES)
    optimizer = dedicate(model, [{"name": "bias", "set": {"route": "adamw"}}], lr=2e-2, adamw_lr=1e-3)
    return model, optimizer, LambdaLR(optimizer, _factor)


def test_every_group_keeps_its_own_base(one_rank: None) -> None:
    model, optimizer, schedule = _start()
    for factor in FACTORS:
        rates = {group["route"]: group["lr"] for group in optimizer.param_groups}
        assert rates == {"muon": pytest.approx(2e-2 * factor), "adamw": pytest.approx(1e-3 * factor)}
        train(model, optimizer, GRADIENTS)
        schedule.step()


def test_the_ratio_survives_a_resume_in_the_warm_up(one_rank: None) -> None:
    model, optimizer, schedule = _start()
    for _ in range(2):
        train(model, optimizer, GRADIENTS)
        schedule.step()
    kept, state = schedule.state_dict(), dmuon.get_optimizer_state_dict(model, optimizer)
    model, optimizer, schedule = _start()
    schedule.load_state_dict(kept)
    dmuon.set_optimizer_state_dict(model, optimizer, state)
    for factor in FACTORS[2:]:
        found = [group["lr"] for group in optimizer.param_groups]
        assert found == [pytest.approx(2e-2 * factor), pytest.approx(1e-3 * factor)]
        train(model, optimizer, GRADIENTS)
        schedule.step()
