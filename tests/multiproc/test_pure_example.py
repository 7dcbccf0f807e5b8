"""The documented example of pure mode: a half-precision model with a single-precision action head, nothing left out."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import world_mesh

pytestmark = pytest.mark.multiproc

VOCABULARY, HIDDEN = 17, 16


class TransformerDecoderLayer(nn.Module):
    """Self-attention in one head and an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, time, dim]."""
        q, k, v = self.qkv(self.input_norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln_2(x))


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(TransformerDecoderLayer(HIDDEN) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Policy(nn.Module):
    """Language model with an action head, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Decoder()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.action_head = TransformerDecoderLayer(HIDDEN)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and actions."""
        hidden = self.model(tokens)
        return self.lm_head(hidden), self.action_head(hidden)


def _dedicate(model: nn.Module, **options: object) -> None:
    dmuon.dedicate_params(
        model,
        world_mesh(),
        predicate=lambda name, param: param.requires_grad,
        param_policy={
            "defaults": {
                "route": "muon",
                "param_dtype": torch.bfloat16,
                "grad_dtype": None,
                "master_dtype": torch.float32,
                "optim_dtype": torch.float32,
            },
            "overrides": [
                {"name": ["embed_tokens", "word_embeddings", "wte", "lm_head"], "set": {"route": "sharded_adamw"}},
                {"name": ["norm", "ln_", ".bias"], "set": {"route": "adamw"}},
                {
                    "name": ["action_head", "action_decoder"],
                    "set": {
                        "param_dtype": torch.float32,
                        "grad_dtype": torch.float32,
                        "output_dtype": torch.float32,
                        "cast_forward_inputs": True,
                    },
                },
            ],
        },
        **options,  # type: ignore[arg-type]
    )


def _hook_boundary(model: Policy) -> dict[str, object]:
    terminal_module_ids = {
        id(module)
        for module in (
            getattr(model, "lm_head", None),
            getattr(getattr(model, "model", None), "embed_tokens", None),
        )
        if isinstance(module, (torch.nn.Embedding, torch.nn.Linear))
    }

    def hook_boundary(module: nn.Module) -> bool:
        if id(module) in terminal_module_ids:
            return True
        return isinstance(module, TransformerDecoderLayer)

    return {"hook_boundary_predicate": hook_boundary}


def _train(with_boundary: bool) -> None:
    torch.manual_seed(0)
    model = Policy().to(torch.bfloat16)
    _dedicate(model, **(_hook_boundary(model) if with_boundary else {}))
    optimizer = dmuon.Muon(model, lr=0.01)
    inside: list[torch.dtype] = []
    model.action_head.mlp[0].register_forward_hook(lambda _, args, __: inside.append(args[0].dtype))
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(6):
        logits, actions = model(tokens)
        assert (logits.dtype, actions.dtype) == (torch.bfloat16, torch.float32)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()) + actions.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert set(inside) == {torch.float32}
    summary = dmuon.summarize_param_groups(model, optimizer)
    _check_summary(summary)
    units = [unit["name"] for unit in dmuon.summarize_comm_plan(model)["units"]]  # type: ignore[attr-defined]
    if with_boundary:
        assert units == ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head", "action_head"]
    else:
        assert units[:4] == ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
        assert "action_head.mlp.0" in units


def _check_summary(summary: dmuon.summaries.ParamGroupSummary) -> None:
    rows = {row["name"]: row for row in json.loads(json.dumps(summary))["parameters"]}
    head, block = rows["action_head.qkv.weight"], rows["model.layers.0.qkv.weight"]
    assert (head["route"], head["param_dtype"], head["output_dtype"]) == ("muon", "float32", "float32")
    assert (block["route"], block["param_dtype"], block["grad_dtype"]) == ("muon", "bfloat16", "bfloat16")
    assert head["matched_policy_overrides"] == [2] and block["matched_policy_overrides"] == []
    assert rows["action_head.ln_2.bias"]["matched_policy_overrides"] == [1, 2]
    sharded = {name for name, row in rows.items() if row["route"] == "sharded_adamw"}
    assert sharded == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(row["route"] == "adamw" for name, row in rows.items() if "norm" in name or name.endswith("bias"))
    text = str(summary)
    assert "overrides[1]" in text and "model.layers.1.out.weight" in text


def _mixed_boundary() -> None:
    model = Policy().to(torch.bfloat16)
    with pytest.raises(dmuon.DtypeConflict, match=r"the model casts its inputs.*bfloat16.*float32"):
        _dedicate(model, hook_boundary_predicate=lambda module: module is model)


def _all() -> None:
    _train(with_boundary=True)
    _train(with_boundary=False)
    _mixed_boundary()


def test_example_runs_as_documented() -> None:
    """With the boundaries of the example, with the default ones, and refused with one boundary for both dtypes."""
    run_ranks(2, _all)
