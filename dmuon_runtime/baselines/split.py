"""Which parameter a baseline trains by Muon and which by AdamW, and the rule that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from dmuon_runtime.boundary import ModuleTree, NamedParameter

__all__ = ["DEFAULT_ADAMW_HINTS", "RoutedParameter", "route_parameters"]

_EMBEDDINGS = ("embed_tokens",)
_HEADS = ("lm_head", "embed_proj", "ngram_head.output")
_CODEBOOKS = ("codebook", "markov_w1", "markov_w2", "ngram_head.unigram", "ngram_head.bigram", "ngram_head.trigram")
_RECURRENT = ("prefix_gru",)
_MIXTURES = ("layer_fusion_weights",)
DEFAULT_ADAMW_HINTS: tuple[str, ...] = (*_EMBEDDINGS, *_HEADS, *_CODEBOOKS, *_RECURRENT, *_MIXTURES)
"""Parts of names of matrices that are tables, vocabulary outputs, stacked gates or mixing weights: no linear maps of
hidden states, so AdamW trains them."""


@dataclass(frozen=True)
class RoutedParameter:
    """A trainable parameter, all of its names, and what trains it."""

    name: str
    aliases: tuple[str, ...]
    parameter: nn.Parameter
    route: Literal["muon", "adamw"]
    rule: str
    """Why it has this route, in words."""


def route_parameters(
    model: nn.Module, optimizer: Literal["adamw", "muon"], hints: Sequence[str] = DEFAULT_ADAMW_HINTS
) -> list[RoutedParameter]:
    """Return every trainable parameter once, in the model's order.

    ``muon`` gives Muon the matrices: two dims, both above 1, no embedding or output head by module, and no name (of
    several, where it is tied) that contains one of ``hints``. Shapes suffice: the model may be on the meta device or
    sharded, whose DTensors have the shape of the whole.
    """
    tree = ModuleTree(model)
    getter = getattr(model, "get_output_embeddings", None)
    head = getattr(getter() if callable(getter) else None, "weight", None)
    found: list[RoutedParameter] = []
    for entry in tree.parameters:
        if not entry.parameter.requires_grad:
            continue
        reason = "optimizer adamw" if optimizer == "adamw" else _why_not_muon(entry, tree, head, hints)
        found.append(
            RoutedParameter(
                name=entry.name,
                aliases=tuple(entry.names[1:]),
                parameter=entry.parameter,
                route="muon" if reason is None else "adamw",
                rule=reason or "matrix",
            )
        )
    return found


def _why_not_muon(entry: NamedParameter, tree: ModuleTree, head: object, hints: Sequence[str]) -> str | None:
    shape = tuple(entry.parameter.shape)
    if len(shape) != 2 or min(shape) <= 1:
        return f"shape {shape} is no matrix"
    if any(isinstance(tree.modules[holder], (nn.Embedding, nn.EmbeddingBag)) for holder in entry.holders):
        return "embedding"
    if entry.parameter is head:
        return "output head"
    matching = [hint for hint in hints if any(hint in name for name in entry.names)]
    return f"name contains {matching[0]!r}" if matching else None
