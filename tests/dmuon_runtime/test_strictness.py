"""What strict routing refuses to orthogonalise, and what it must not refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dmuon_runtime as dmuon
from dmuon_runtime.plan import RuntimePlan


class Holder(nn.Module):
    """Named children in a module that is never called."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called."""
        return x


class Conv1D(nn.Module):
    """A weight stored [inputs, outputs], under the name that GPT-2's has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called."""
        return x


def _plan(model: nn.Module, *overrides: dict[str, object]) -> RuntimePlan:
    policy = {"overrides": list(overrides)}
    return dmuon.plan_params(model, 2, lambda name, p: p.requires_grad, param_policy=policy)


def _refusals(model: nn.Module, *overrides: dict[str, object]) -> str:
    with pytest.raises(dmuon.RouteRefused) as found:
        _plan(model, *overrides)
    return str(found.value)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


@pytest.mark.parametrize("name", ["output", "lm_head", "decoder", "readout"])
def test_a_head_is_found_by_type_and_shape_whatever_its_name(name: str) -> None:
    model = Holder(tok=nn.Embedding(50, 8), pos=nn.Embedding(16, 8), up=_linear(8, 16), **{name: _linear(8, 50)})
    text = _refusals(model, {"name": ["tok", "pos"], "set": {"route": "sharded_adamw"}})
    assert f"{name}.weight: routed to muon" in text and "output head" in text
    assert "up.weight" not in text, "a projection shaped like a small table is no head"


def test_what_the_model_calls_its_output_is_a_head() -> None:
    class Named(Holder):
        def get_output_embeddings(self) -> nn.Module:
            """The head, as transformers asks for it."""
            return self.get_submodule("score")

    assert "score.weight" in _refusals(Named(score=_linear(8, 5)))
    assert _plan(Holder(score=_linear(8, 5))).parameters[0].route == "muon", "nothing says that this one is a head"


def test_a_projection_in_a_layer_may_have_the_shape_of_the_table() -> None:
    layers = nn.ModuleList([Holder(up=_linear(8, 16))])
    plan = _plan(Holder(tok=nn.Embedding(16, 8), layers=layers), {"name": "tok", "set": {"route": "sharded_adamw"}})
    assert {entry.name: entry.route for entry in plan.parameters}["layers.0.up.weight"] == "muon"


def test_grouped_convolutions_are_no_matrices() -> None:
    model = Holder(
        temporal=nn.Conv1d(32, 32, 4, groups=32, bias=False), pairs=nn.Conv2d(8, 8, 3, groups=2, bias=False),
        patch=nn.Conv2d(3, 8, 4, bias=False), first=nn.Conv2d(1, 8, 3, bias=False),
    )  # fmt: skip
    text = _refusals(model, {"name": ["patch", "first", "pairs", "temporal"], "set": {"matrix_view": "flatten"}})
    assert text.count("grouped convolution") == 2
    assert "temporal.weight" in text and "pairs.weight" in text and "patch.weight" not in text
    assert "first.weight" not in text, "one input channel, but a matrix of 8 by 9 as the policy reads it"


def test_a_view_that_leaves_a_thin_matrix_is_refused() -> None:
    model = Holder(gate=nn.Conv2d(8, 1, 3, bias=False), fused=_linear(8, 9))
    text = _refusals(
        model,
        {"name": "gate", "set": {"matrix_view": "flatten"}},
        {"name": "fused", "set": {"split_rows": [8, 1]}},
    )
    assert "as 1 by 72, a dim of 1" in text and "as 1 by 8, a dim of 1" in text


def test_weights_stored_the_other_way_are_pointed_out() -> None:
    model = Holder(c_fc=Conv1D(), c_proj=Conv1D())
    (warning,) = _plan(model, {"name": "c_proj", "set": {"matrix_view": "transposed"}}).warnings
    assert warning.startswith("c_fc.weight: Conv1D stores [inputs, outputs]") and "c_proj" not in warning
    assert not _plan(model, {"name": ["c_"], "set": {"matrix_view": "transposed"}}).warnings


def test_split_rows_count_outputs_in_every_view() -> None:
    model = Holder(c_attn=Conv1D())
    assert _plan(model, {"set": {"matrix_view": "transposed", "split_rows": [8, 8, 8]}}).num_matrices == 3
    with pytest.raises(dmuon.RouteRefused, match=r"adds up to 24, but it has 8 rows"):
        _plan(model, {"set": {"split_rows": [8, 8, 8]}})
