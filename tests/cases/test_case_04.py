"""Case 4. Symptom elsewhere: state is restored by position, and momentum lands on another weight of the same shape."""

from __future__ import annotations

import pytest
import torch

import dmuon_runtime as dmuon
from tests.cases.common import Weights, dedicate, masters, train

GRADIENTS = {"a": torch.full((4, 4), 0.05, dtype=torch.float64), "b": torch.eye(4, dtype=torch.float64)}


def _momentum(model: torch.nn.Module, optimizer: dmuon.Muon) -> dict[str, torch.Tensor]:
    state = dmuon.get_optimizer_state_dict(model, optimizer)["state"]
    return {name: slots["momentum_buffer"] for name, slots in state.items()}


def test_state_goes_by_name(one_rank: None) -> None:
    model = Weights({"a": (4, 4), "b": (4, 4)})
    optimizer = dedicate(model)
    train(model, optimizer, GRADIENTS)
    weights, state = dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)
    other = Weights({"b": (4, 4), "a": (4, 4)})
    resumed = dedicate(other)
    dmuon.set_model_state_dict(other, weights)
    dmuon.set_optimizer_state_dict(other, resumed, state)
    assert torch.equal(_momentum(other, resumed)["a"], GRADIENTS["a"].float())
    for one, optim in ((model, optimizer), (other, resumed)):
        train(one, optim, GRADIENTS)
    assert all(torch.equal(value, masters(resumed)[name]) for name, value in masters(optimizer).items())


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(one_rank: None) -> None:
    model = Weights({"a": (4, 4), "b": (4, 4)})
    optimizer = dedicate(model)
    train(model, optimizer, GRADIENTS)
    state = dmuon.get_optimizer_state_dict(model, optimizer)
    other = Weights({"a": (4, 5), "c": (4, 4)})
    resumed = dedicate(other)
    with pytest.raises(dmuon.StateMismatch) as caught:
        dmuon.set_optimizer_state_dict(other, resumed, state)
    for line in ("missing momentum_buffer of c", "unexpected momentum_buffer of b", "(4, 4), the optimizer's (4, 5)"):
        assert line in str(caught.value)
    assert all(not buffer.any() for buffer in _momentum(other, resumed).values())


def test_the_way_by_position_is_closed(one_rank: None) -> None:
    optimizer = dedicate(Weights({"a": (4, 4), "b": (4, 4)}))
    with pytest.raises(dmuon.UnsupportedFeature, match="set_optimizer_state_dict"):
        optimizer.load_state_dict(optimizer.state_dict())
