"""Case 63. Symptom elsewhere: a tensor rate loses its type or goes stale when a schedule or a hand replaces it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

from tests.cases.common import Weights, dedicate, masters, train

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
}


@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_the_rate_used_is_the_rate_that_stands_there(one_rank: None, kind: str) -> None:
    """Without decay and momentum each change is proportional to the rate; a float and a tensor by hand in between."""
    shapes = {"weight": (6, 6), "bias": (6,)}
    model = Weights(shapes)
    options = {"lr": torch.tensor(0.1, dtype=torch.float64), "adamw_lr": torch.tensor(0.01, dtype=torch.float64)}
    routes = [{"name": "bias", "set": {"route": "adamw"}}]
    doubles = {"master_dtype": "fp64", "optim_dtype": "fp64"}
    optimizer = dedicate(model, routes, doubles, momentum=0.0, adamw_weight_decay=0.0, **options)
    schedule = SCHEDULES[kind](optimizer)
    gradients = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    changes: dict[str, list[torch.Tensor]] = {"weight": [], "bias": []}
    for step in range(6):
        if step == 4:
            for group, value in zip(optimizer.param_groups, (0.3, torch.tensor(0.03)), strict=True):
                group["lr"] = value
        rates = {"weight": float(optimizer.param_groups[0]["lr"]), "bias": float(optimizer.param_groups[1]["lr"])}
        before = masters(optimizer)
        train(model, optimizer, gradients)
        for name, value in masters(optimizer).items():
            changes[name].append((value - before[name]) / rates[name])
        if step < 3:
            schedule.step(1.0) if kind == "plateau" else schedule.step()  # type: ignore[arg-type]
    for name, found in changes.items():
        for other in found[1:]:
            assert torch.allclose(other, found[0], rtol=1e-5), name
