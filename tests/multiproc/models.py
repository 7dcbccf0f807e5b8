"""Small models, one for each way in which a module can be called."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["POLICY", "Block", "ToyLM", "batch", "lm_loss", "make"]

VOCABULARY = 13
POLICY: dict[str, object] = {
    "defaults": {"master_dtype": "float64", "optim_dtype": "float64"},
    "overrides": [
        {"name": ["embed", "lm_head"], "set": {"route": "sharded_adamw"}},
        {"name": ["norm", ".bias", "gain"], "set": {"route": "adamw"}},
    ],
}


@dataclass
class BlockOutput:
    """Two tensors in an object that torch knows nothing about."""

    hidden: Tensor
    extra: dict[str, list[Tensor]]


class Block(nn.Module):
    """Pre-norm MLP block with widths that no world size divides (12 by 20, a bias of 20, a gain of 1)."""

    def __init__(self, dim: int = 12, style: str = "plain") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 20)
        self.down = nn.Linear(20, dim, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.style = style

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor | BlockOutput | tuple[Tensor, object]:
        """Return the block's output in the shape that ``style`` asks for."""
        out = x + self.gain * self.down(F.gelu(self.up(self.norm(x))))
        if scale is not None:
            out = out * scale
        if self.style == "dataclass":
            return BlockOutput(hidden=out * 2, extra={"more": [out, out.detach()]})
        if self.style == "tuple":
            return out.sum() * 0, (out, {"unused": out * 3})
        return out


class ToyLM(nn.Module):
    """Embedding, three blocks, head; how blocks are called is set by ``mode``."""

    def __init__(self, mode: str = "plain", tied: str = "", dim: int = 12) -> None:
        super().__init__()
        self.mode = mode
        style = mode if mode in ("dataclass", "tuple") else "plain"
        if tied == "head_first":
            self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim, style) for _ in range(3))
        self.norm = nn.LayerNorm(dim)
        if tied != "head_first":
            self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, tokens: Tensor, calls: tuple[int, ...] = (1, 1, 1)) -> Tensor:
        """Return logits; block i is called ``calls[i]`` times."""
        self.seen += 1
        x = self.embed(tokens)
        for block, times in zip(self.layers, calls, strict=True):
            for _ in range(times):
                x = self._call(block, x)
        return self.lm_head(self.norm(x))

    def _call(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.mode in ("reentrant", "saved") and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        if self.mode == "keywords":
            return block(x=x, scale=torch.full((), 0.5, dtype=x.dtype))
        out = block(x)
        if self.mode == "dataclass":
            return out.extra["more"][0]
        return out[1][0] if self.mode == "tuple" else out


def make(mode: str = "plain", tied: str = "", seed: int = 0, dtype: torch.dtype = torch.float64) -> ToyLM:
    """Return a model with fixed weights, none of them zero, so that relative errors mean something."""
    torch.manual_seed(seed)
    model = ToyLM(mode, tied)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.3, std=0.3)
    return model.to(dtype)


def batch(step: int, rank: int, micro: int = 0) -> Tensor:
    """Return token ids [3, 7] that differ by step, rank and micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(0, VOCABULARY, (3, 7), generator=generator)


def lm_loss(model: nn.Module, tokens: Tensor, calls: tuple[int, ...] = (1, 1, 1)) -> Tensor:
    """Return the mean next-token loss."""
    tokens = tokens.to(model.get_buffer("seen").device)
    logits = model(tokens, calls)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
