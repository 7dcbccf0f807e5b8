"""Refusal of routes that would orthogonalise what is no matrix. All offenders at once, each with what mends it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dmuon_runtime.boundary import ModuleTree, NamedParameter
from dmuon_runtime.errors import RouteRefused
from dmuon_runtime.matrices import matrix_shapes
from dmuon_runtime.policy import PolicyFields

__all__ = ["check_routes", "check_views", "find_heads", "view_warnings"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_heads(tree: ModuleTree) -> set[int]:
    """Return ids of the weights of output heads.

    A head is what the model itself names so, a Linear called ``lm_head``, or one outside numbered layers whose weight
    has the shape of the largest embedding's table.
    """
    getter = getattr(tree.model, "get_output_embeddings", None)
    named = getter() if callable(getter) else None
    tables = [tuple(module.weight.shape) for module in tree.modules.values() if isinstance(module, _EMBEDDINGS)]
    heads: set[int] = set()
    for name, module in tree.modules.items():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        by_name = isinstance(module, nn.Linear) and name.rpartition(".")[2] == "lm_head"
        numbered = any(part.isdecimal() for part in name.split("."))
        by_shape = isinstance(module, nn.Linear) and not numbered and tuple(weight.shape) == max(tables, default=None)
        if by_name or by_shape or module is named:
            heads.add(id(weight))
    return heads


def _reason(entry: NamedParameter, policy: PolicyFields, tree: ModuleTree, heads: set[int]) -> tuple[str, str] | None:
    """Return why Newton-Schulz must not touch the parameter and the ``set`` that mends it, or None."""
    shape = tuple(entry.parameter.shape)
    holders = [tree.modules[holder] for holder in entry.holders]
    if len(shape) < 2:
        return f"shape {shape} has fewer than two dims", '{"route": "adamw"}'
    if any(isinstance(holder, _EMBEDDINGS) for holder in holders):
        tied = " (tied to an output)" if len(entry.names) > 1 else ""
        return f"it is the weight of an embedding{tied}", '{"route": "sharded_adamw"}'
    if id(entry.parameter) in heads:
        return "it is the weight of an output head", '{"route": "sharded_adamw"}'
    if any(getattr(holder, "groups", 1) != 1 for holder in holders if isinstance(holder, _CONVOLUTIONS)):
        return f"shape {shape} is a grouped convolution, many small filters and no matrix", '{"route": "adamw"}'
    if 1 in shape and policy.matrix_view is None:
        return f"shape {shape} has a dim of 1", '{"route": "adamw"}'
    if len(shape) > 2 and policy.matrix_view is None:
        views = '"experts" is a matrix in the last two dims, "flatten" one of the first dim by all others'
        return f"shape {shape} has more than two dims and the policy does not say how to read them ({views})", (
            '{"matrix_view": "experts"}'
        )
    matrices = matrix_shapes(shape, policy.matrix_view, policy.split_rows)
    thin = [f"{matrix.rows} by {matrix.columns}" for matrix in matrices if min(matrix.rows, matrix.columns) < 2]
    if thin:
        return f"its policy reads shape {shape} as {', '.join(thin)}, a dim of 1", '{"route": "adamw"}'
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
        rows = matrix_shapes(shape, policy.matrix_view, ())[0].rows
        if sum(policy.split_rows) != rows:
            names.append(entry.name)
            lines.append(
                f"{entry.name}: split_rows {list(policy.split_rows)} adds up to {sum(policy.split_rows)}, but it has "
                f"{rows} rows; state blocks that cover all rows"
            )
    if lines:
        raise RouteRefused("split_rows does not fit:\n  " + "\n  ".join(lines), names)


def view_warnings(
    parameters: list[NamedParameter], policies: Mapping[str, PolicyFields], tree: ModuleTree
) -> list[str]:
    """Return one warning that names the matrices which are stored [inputs, outputs] but not read so."""
    found = [
        entry.name
        for entry in parameters
        if policies[entry.name].route == "muon"
        and policies[entry.name].matrix_view is None
        and type(tree.modules[entry.holders[0]]).__name__ == "Conv1D"
    ]
    if not found:
        return []
    return [
        f'{", ".join(found)}: Conv1D stores [inputs, outputs]; without {{"matrix_view": "transposed"}} split_rows '
        'would cut inputs, and scale="original" would take them for rows'
    ]
