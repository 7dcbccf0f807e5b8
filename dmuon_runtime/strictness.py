"""Refusal of routes that would orthogonalise what is no matrix. All offenders at once, each with what mends it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dmuon_runtime.boundary import ModuleTree, NamedParameter
from dmuon_runtime.errors import RouteRefused
from dmuon_runtime.policy import PolicyFields

__all__ = ["check_routes", "check_views", "find_heads"]


def find_heads(tree: ModuleTree) -> set[int]:
    """Return ids of the weights of output heads: what the model itself names so, or a Linear called ``lm_head``."""
    heads: set[int] = set()
    getter = getattr(tree.model, "get_output_embeddings", None)
    named = getter() if callable(getter) else None
    for name, module in tree.modules.items():
        by_name = isinstance(module, nn.Linear) and name.rpartition(".")[2] == "lm_head"
        weight = getattr(module, "weight", None)
        if (by_name or module is named) and isinstance(weight, nn.Parameter):
            heads.add(id(weight))
    return heads


def _reason(entry: NamedParameter, policy: PolicyFields, tree: ModuleTree, heads: set[int]) -> tuple[str, str] | None:
    """Return why Newton-Schulz must not touch the parameter and the ``set`` that mends it, or None."""
    shape = tuple(entry.parameter.shape)
    if len(shape) < 2:
        return f"shape {shape} has fewer than two dims", '{"route": "adamw"}'
    if any(isinstance(tree.modules[holder], (nn.Embedding, nn.EmbeddingBag)) for holder in entry.holders):
        tied = " (tied to an output)" if len(entry.names) > 1 else ""
        return f"it is the weight of an embedding{tied}", '{"route": "sharded_adamw"}'
    if id(entry.parameter) in heads:
        return "it is the weight of an output head", '{"route": "sharded_adamw"}'
    if 1 in shape:
        return f"shape {shape} has a dim of 1", '{"route": "adamw"}'
    if len(shape) > 2 and policy.matrix_view is None:
        cure = '{"matrix_view": "experts"} (a matrix in the last two dims) or {"matrix_view": "flatten"}'
        return f"shape {shape} has more than two dims and the policy does not say how to read them", cure
    return None


def check_routes(parameters: list[NamedParameter], policies: Mapping[str, PolicyFields], tree: ModuleTree) -> None:
    """Raise :class:`RouteRefused` when strict routing forbids ``muon`` for any of ``parameters``."""
    heads = find_heads(tree)
    lines: list[str] = []
    names: list[str] = []
    for entry in parameters:
        policy = policies[entry.name]
        found = _reason(entry, policy, tree, heads) if policy.route == "muon" else None
        if found is not None:
            names.append(entry.name)
            lines.append(
                f'{entry.name}: routed to muon by {policy.rule}, but {found[0]}; add {{"name": ["{entry.name}"], '
                f'"set": {found[1]}}} to overrides'
            )
    if lines:
        raise RouteRefused("strict_routes refuses to orthogonalise what is no matrix:\n  " + "\n  ".join(lines), names)


def check_views(parameters: list[NamedParameter], policies: Mapping[str, PolicyFields]) -> None:
    """Raise :class:`RouteRefused` when ``split_rows`` does not add up to the rows, whatever ``strict_routes`` says."""
    lines: list[str] = []
    names: list[str] = []
    for entry in parameters:
        policy, shape = policies[entry.name], tuple(entry.parameter.shape)
        if policy.route != "muon" or not policy.split_rows:
            continue
        rows = shape[-2] if policy.matrix_view == "experts" and len(shape) > 2 else shape[0] if shape else 1
        if sum(policy.split_rows) != rows:
            names.append(entry.name)
            lines.append(
                f"{entry.name}: split_rows {list(policy.split_rows)} adds up to {sum(policy.split_rows)}, but it has "
                f"{rows} rows; state blocks that cover all rows"
            )
    if lines:
        raise RouteRefused("split_rows does not fit:\n  " + "\n  ".join(lines), names)
