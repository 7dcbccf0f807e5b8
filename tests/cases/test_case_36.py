"""Case 36. Symptom elsewhere: "two dims or more" sends embeddings and heads to Muon when no name says "embed"."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dmuon_runtime as dmuon
from tests.cases.common import plan


class Model(nn.Module):
    """Modules under given names around one projection."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 12, bias=False)])
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called."""
        return x


def _table() -> nn.Embedding:
    return nn.Embedding(40, 8)


def _head(outputs: int = 40) -> nn.Linear:
    return nn.Linear(8, outputs, bias=False)


MODELS = {
    "wte": (Model(wte=_table()), {"wte.weight": "embedding"}),
    "tok and output": (Model(tok=_table(), output=_head()), {"tok.weight": "embedding", "output.weight": "head"}),
    "bag": (Model(tags=nn.EmbeddingBag(40, 8)), {"tags.weight": "embedding"}),
    "patch_proj": (Model(patch_proj=nn.Conv2d(3, 8, 4, bias=False)), {"patch_proj.weight": "more than two dims"}),
    "tied": (Model(tok=_table(), output=_head()), {"tok.weight": "tied to an output"}),
}
MODELS["tied"][0].output.weight = MODELS["tied"][0].tok.weight


@pytest.mark.parametrize("name", list(MODELS))
def test_types_and_rules_decide_not_names(name: str) -> None:
    model, expected = MODELS[name]
    with pytest.raises(dmuon.RouteRefused) as found:
        plan(model)
    assert set(found.value.names) == set(expected)
    assert all(reason in str(found.value) for reason in expected.values())
    overrides = [{"name": list(expected), "set": {"route": "adamw"}}]
    rules = {entry.name: entry.rule for entry in plan(model, overrides).parameters}
    assert rules == {"layers.0.weight": "defaults", **dict.fromkeys(expected, "overrides[0]")}


def test_a_classifier_is_what_the_policy_says() -> None:
    """Nothing about ``score`` says that it is a head, so the table shows that only the default decided."""
    (layer, score) = plan(Model(score=_head(5))).parameters
    assert (score.name, score.route, score.rule, layer.rule) == ("score.weight", "muon", "defaults", "defaults")
