"""Case 5. Symptom elsewhere: state made at first use is missing for weights without gradients, and resume breaks."""

from __future__ import annotations

import torch

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters, plan, train


def test_state_is_there_from_the_start(one_rank: None) -> None:
    """Two linears of which only the first is used, and a weight without elements."""
    model = Weights({"used": (4, 4), "unused": (4, 4), "table": (8, 4), "nothing": (0, 4)})
    optimizer = dedicate(model, [{"name": "table", "set": {"route": "sharded_adamw"}}])
    managed = {entry.name for entry in dmuon.get_plan(model).parameters}
    assert managed == {"used", "unused", "table"}
    assert {piece.plan.name for piece in optimizer.pieces if piece.parameter in optimizer.state} == managed
    keys = set(optimizer.state_dict()["state"])
    before = masters(optimizer)
    train(model, optimizer, {"used": torch.randn(4, 4, dtype=torch.float64)})
    assert set(optimizer.state_dict()["state"]) == keys, "a step adds no keys"
    after = masters(optimizer)
    assert not torch.equal(after["used"], before["used"])
    assert torch.equal(after["unused"], before["unused"]) and torch.equal(after["table"], before["table"])
    assert set(dmuon.get_model_state_dict(model)) == managed | {"nothing"}


def test_no_elements_means_no_route() -> None:
    found = plan(Weights({"weight": (4, 4), "nothing": (0, 4), "none": (4, 0)}))
    assert [entry.name for entry in found.parameters] == ["weight"]
    assert [warning.split()[0] for warning in found.warnings] == ["nothing", "none"]


def test_frozen_after_training_keeps_its_momentum(one_rank: None) -> None:
    model = Weights({"a": (4, 4), "b": (4, 4)})
    optimizer = dedicate(model)
    gradients = {name: torch.randn(4, 4, dtype=torch.float64) for name in ("a", "b")}
    train(model, optimizer, gradients)
    momentum = optimizer.state[model.get_parameter("a")]["momentum_buffer"].clone()
    kept = masters(optimizer)["a"]
    model.get_parameter("a").requires_grad_(False)
    train(model, optimizer, gradients)
    assert torch.equal(optimizer.state[model.get_parameter("a")]["momentum_buffer"], momentum)
    assert torch.equal(masters(optimizer)["a"], kept)
    model.get_parameter("a").requires_grad_(True)
    train(model, optimizer, gradients)
    assert torch.allclose(optimizer.state[model.get_parameter("a")]["momentum_buffer"].double(), gradients["a"] * 1.95)


def test_frozen_and_unused_weights_come_back_with_what_was_saved(one_rank: None) -> None:
    """One weight is trained and then frozen, one is never used, one has no elements: all resume."""
    shapes = {"trained": (4, 4), "unused": (4, 4), "nothing": (0, 4)}
    model = Weights(shapes)
    optimizer = dedicate(model)
    train(model, optimizer, {"trained": torch.randn(4, 4, dtype=torch.float64)})
    model.get_parameter("trained").requires_grad_(False)
    saved = dmuon.get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]) == {"trained", "unused"}
    other = Weights(shapes)
    resumed = dedicate(other)
    dmuon.set_model_state_dict(other, dmuon.get_model_state_dict(model))
    dmuon.set_optimizer_state_dict(other, resumed, saved)
    other.get_parameter("trained").requires_grad_(False)
    found = dmuon.get_optimizer_state_dict(other, resumed)["state"]
    assert found["trained"]["momentum_buffer"].any() and not found["unused"]["momentum_buffer"].any()
    assert all(
        torch.equal(value, found[name][kind]) for name, slots in saved["state"].items() for kind, value in slots.items()
    )
