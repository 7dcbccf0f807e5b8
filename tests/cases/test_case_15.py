"""Case 15. Symptom elsewhere: a tied weight goes by one of its names, whichever was registered first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dmuon_runtime as dmuon
from dmuon_runtime.optimizer_state import OptimizerState
from tests.cases.common import dedicate, plan
from tests.multiproc.harness import run_ranks

VOCABULARY, DIM = 11, 4
ROUTES: list[dict[str, object]] = [{"name": "emb", "set": {"route": "sharded_adamw"}}]


class Tied(nn.Module):
    """Embedding and head with one weight, registered in either order."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        emb = nn.Embedding(VOCABULARY, DIM)
        head = nn.Linear(DIM, VOCABULARY, bias=False)
        head.weight = emb.weight
        for name, module in [("head", head), ("emb", emb)] if head_first else [("emb", emb), ("head", head)]:
            self.add_module(name, module)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from itself."""
        return F.cross_entropy(self.get_submodule("head")(self.get_submodule("emb")(tokens)), tokens)


def test_one_entry_with_both_names_in_either_order() -> None:
    for head_first in (True, False):
        (entry,) = plan(Tied(head_first), ROUTES).parameters
        assert entry.route == "sharded_adamw"
        assert {entry.name, *entry.aliases} == {"emb.weight", "head.weight"}
        with pytest.raises(dmuon.RouteRefused, match="tied to an output"):
            plan(Tied(head_first))


def test_a_checkpoint_holds_it_once_and_gives_it_to_either_order(one_rank: None) -> None:
    saved: list[tuple[dict[str, Tensor], OptimizerState]] = []
    for head_first in (True, False):
        model = Tied(head_first)
        optimizer = dedicate(model, ROUTES)
        model(torch.arange(VOCABULARY)).backward()
        optimizer.step()
        optimizer.zero_grad()
        (weight,) = [entry for entry in dmuon.state_layout(model, optimizer) if entry.kind == "weight"]
        assert set(weight.names) == {"emb.weight", "head.weight"}
        (part,) = [part for part in dmuon.state_parts(model, optimizer) if part.kind == "weight" and part.is_source]
        assert part.stop - part.start == VOCABULARY * DIM
        if saved:
            dmuon.set_optimizer_state_dict(model, optimizer, saved[0][1])
        saved.append((dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)))
    (first, second) = saved
    assert all(torch.equal(value, second[0][name]) for name, value in first[0].items())
    assert all(
        torch.equal(value, second[1]["state"]["emb.weight"][kind])
        for kind, value in first[1]["state"]["head.weight"].items()
    )


def _train() -> None:
    states = []
    for head_first in (True, False):
        model = Tied(head_first)
        before = model.get_parameter("emb.weight").detach().clone()
        optimizer = dedicate(model, ROUTES)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randint(0, VOCABULARY, (6,), generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = dmuon.get_model_state_dict(model)
        assert torch.equal(state["emb.weight"], state["head.weight"])
        assert (state["emb.weight"] - before).abs().min() > 0, "every row moves, those of the last rank too"
        assert sum(piece.master.numel() for piece in optimizer.pieces) <= -(-VOCABULARY * DIM // 4), "held once"
        states.append(state["emb.weight"])
    assert torch.equal(*states)


@pytest.mark.multiproc
def test_both_orders_train_alike() -> None:
    """Eleven rows on four ranks: shards that do not fill."""
    run_ranks(4, _train)
