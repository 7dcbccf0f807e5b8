"""Case 34. Symptom elsewhere: with adapters, norms and embeddings stay trainable, or adapters come after the freeze."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dmuon_runtime as dmuon
from tests.cases.common import dedicate, plan
from tests.multiproc.models import ToyLM, batch, lm_loss, make

RANK = 4
ROUTES: list[dict[str, object]] = [{"name": ["adapter"], "set": {"route": "muon"}}]


class Adapted(nn.Module):
    """A linear with a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.adapter_a = nn.Parameter(torch.randn(RANK, base.in_features, dtype=torch.float64))
        self.adapter_b = nn.Parameter(torch.zeros(base.out_features, RANK, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the base's output plus the addition."""
        return self.base(x) + x @ self.adapter_a.T @ self.adapter_b.T


def _adapted() -> ToyLM:
    model = make()
    for block in model.layers:
        block.up = Adapted(block.get_submodule("up"))  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return model


def test_only_adapters_train(one_rank: None) -> None:
    """Everything else is bitwise as it was after three steps, and the summary lists it as frozen."""
    model = _adapted()
    before = {name: value.clone() for name, value in model.state_dict().items() if name != "seen"}
    optimizer = dedicate(model, ROUTES)
    for step in range(3):
        lm_loss(model, batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = dmuon.get_model_state_dict(model)
    moved = {name for name, value in before.items() if not torch.equal(value.to(after[name].dtype), after[name])}
    assert moved == {name for name in before if "adapter" in name}
    summary = dmuon.summarize_param_groups(model, optimizer)
    assert summary["dedicated_param_count"] == len(moved) == 6
    assert set(summary["frozen"]) == set(before) - moved  # type: ignore[call-overload]
    assert {row["route"] for row in summary["parameters"]} == {"muon"}  # type: ignore[attr-defined]


def test_a_leak_is_seen_in_the_plan() -> None:
    model = _adapted()
    model.get_submodule("norm").requires_grad_(True)
    with pytest.raises(dmuon.RouteRefused) as found:
        plan(model, ROUTES)
    assert found.value.names == ("norm.weight", "norm.bias")


def test_what_becomes_trainable_later_is_refused(one_rank: None) -> None:
    model = _adapted()
    dedicate(model, ROUTES)
    model.get_submodule("norm").requires_grad_(True)
    with pytest.raises(dmuon.UnmanagedParameters, match=r"norm\.weight, norm\.bias"):
        dmuon.Muon(model)


@pytest.mark.skip(reason="a job spec cannot yet state what is expected to train (expect_trainable)")
def test_a_spec_can_state_what_trains() -> None:
    """Refused with the list of leaks."""
