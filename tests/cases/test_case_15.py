"""Case 15. Symptom elsewhere: a tied weight goes by one of its names, whichever was registered first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dmuon_runtime as dmuon
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
