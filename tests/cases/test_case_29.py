"""Case 29. Symptom elsewhere: a one-row matrix becomes a sign, factors explode, an empty dim divides by zero."""

from __future__ import annotations

import pytest
import torch

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters, plan, train

SHAPES = {"row": (1, 64), "column": (64, 1), "one": (1, 1), "tall": (8192, 2), "no_rows": (0, 4), "no_columns": (4, 0)}
THIN: list[dict[str, object]] = [{"name": ["row", "column", "one"], "set": {"route": "adamw"}}]


def test_thin_matrices_are_refused_with_the_reason() -> None:
    with pytest.raises(dmuon.RouteRefused) as found:
        plan(Weights(SHAPES))
    assert set(found.value.names) == {"row", "column", "one"}, "not the tall one, and not those without elements"
    assert str(found.value).count("has a dim of 1") == 3 and '"route": "adamw"' in str(found.value)


def test_degenerate_shapes_train(one_rank: None) -> None:
    model = Weights(SHAPES)
    optimizer = dedicate(model, THIN, ns_backend="gram", lr=1.0)
    rows = {row["name"]: row for row in dmuon.summarize_param_groups(model, optimizer)["parameters"]}  # type: ignore[attr-defined]
    assert set(rows) == set(SHAPES) - {"no_rows", "no_columns"}
    assert rows["tall"]["update_scale"] == pytest.approx(0.2 * 8192**0.5), "the factor is shown"
    gradients = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items() if name in rows}
    before = masters(optimizer)
    train(model, optimizer, gradients)
    for name, value in masters(optimizer).items():
        assert bool(torch.isfinite(value).all()) and not torch.equal(value, before[name])


def test_without_strictness_thin_matrices_are_still_finite(one_rank: None) -> None:
    model = Weights(SHAPES)
    mesh = torch.distributed.DeviceMesh("cpu", torch.arange(1))
    dmuon.dedicate_params(model, mesh, lambda name, p: True, strict_routes=False)
    optimizer = dmuon.Muon(model)
    train(model, optimizer, {name: torch.randn(s, dtype=torch.float64) for name, s in SHAPES.items()})
    assert all(bool(torch.isfinite(value).all()) for value in masters(optimizer).values())
