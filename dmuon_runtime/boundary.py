"""Which module's forward carries the hooks of a parameter, and the order of those modules.

A tied parameter belongs to the lowest module that contains all of its names. Otherwise a predicate, or the default rule
(the ``layers.N`` or ``blocks.N`` ancestor, else the direct parent), chooses. A module that has no forward of its own
(a list or dict of modules) is never called, so the choice climbs past it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from dmuon_runtime.errors import BoundaryError

__all__ = ["Boundaries", "BoundaryPredicate", "ModuleTree", "NamedParameter"]

BoundaryPredicate = Callable[[nn.Module], bool]


@dataclass
class NamedParameter:
    """A parameter with every name it has and the modules that hold it, in registration order."""

    parameter: nn.Parameter
    names: list[str]
    holders: list[str]
    """Names of the modules that hold it, one for each of ``names``."""

    @property
    def name(self) -> str:
        """The first name, under which it is planned, counted and saved."""
        return self.names[0]


@dataclass
class ModuleTree:
    """A model's modules and parameters by name, read in one pass."""

    model: nn.Module
    modules: dict[str, nn.Module] = field(default_factory=dict)
    position: dict[str, int] = field(default_factory=dict)
    """Place of a module in registration order (a parent before its children)."""
    last_descendant: dict[str, int] = field(default_factory=dict)
    """Largest position below a module: where its forward ends relative to others."""
    parameters: list[NamedParameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        by_id: dict[int, NamedParameter] = {}
        for index, (name, module) in enumerate(self.model.named_modules()):
            self.modules[name] = module
            self.position[name] = self.last_descendant[name] = index
            for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                full = f"{name}.{leaf}" if name else leaf
                entry = by_id.setdefault(id(parameter), NamedParameter(parameter, [], []))
                entry.names.append(full)
                entry.holders.append(name)
        self.parameters = list(by_id.values())
        for name in reversed(self.modules):
            parent = self.parent(name)
            if parent is not None:
                self.last_descendant[parent] = max(self.last_descendant[parent], self.last_descendant[name])

    def parent(self, name: str) -> str | None:
        """Return the name of the enclosing module, or None for the model itself."""
        return None if not name else name.rpartition(".")[0]

    def ancestors(self, name: str) -> list[str]:
        """Return ``name`` and every enclosing module's name, innermost first."""
        chain = [name]
        while (above := self.parent(chain[-1])) is not None:
            chain.append(above)
        return chain


def _layer_prefix(holder: str) -> str | None:
    parts = holder.split(".")
    for index, part in enumerate(parts[:-1]):
        if part in ("layers", "blocks"):
            return ".".join(parts[: index + 2])
    return None


@dataclass(frozen=True)
class Boundaries:
    """Chooses the boundary of each parameter of ``tree``."""

    tree: ModuleTree
    predicate: BoundaryPredicate | None = None
    strict: bool = True

    def choose(self, parameters: Sequence[NamedParameter]) -> dict[str, str]:
        """Return module name by parameter name; raises :class:`BoundaryError` with every parameter that has none."""
        chosen: dict[str, str] = {}
        missing: list[str] = []
        for entry in parameters:
            boundary = self._choose_one(entry)
            if boundary is None:
                missing.append(entry.name)
            else:
                chosen[entry.name] = self._callable(boundary)
        if missing:
            raise BoundaryError(
                f"hook_boundary_predicate holds for no module around {', '.join(missing)}; widen it, or pass "
                "hook_boundary_strict=False to use the direct parent",
                missing,
            )
        return chosen

    def _choose_one(self, entry: NamedParameter) -> str | None:
        holder = entry.holders[0]
        if len(set(entry.holders)) > 1:
            return self._common(entry.holders)
        if self.predicate is not None:
            for name in self.tree.ancestors(holder):
                if self.predicate(self.tree.modules[name]):
                    return name
            return None if self.strict else holder
        prefix = _layer_prefix(holder)
        if prefix is not None:
            return prefix
        parent = self.tree.parent(holder)
        if parent is not None and isinstance(self.tree.modules.get(parent), nn.MultiheadAttention):
            return parent  # it reads its projection's weight without calling the projection
        return holder

    def _common(self, holders: Sequence[str]) -> str:
        others = [set(self.tree.ancestors(holder)) for holder in holders[1:]]
        return next(name for name in self.tree.ancestors(holders[0]) if all(name in other for other in others))

    def _callable(self, name: str) -> str:
        for above in self.tree.ancestors(name):
            module = self.tree.modules.get(above)
            if module is not None and type(module).forward is not nn.Module.forward:
                return above
        return ""
