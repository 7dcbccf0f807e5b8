"""Reads the repository's own source for the architecture tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("orchestrator", "worker", "dmuon_runtime", "dashboards")


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed source file with its dotted name."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The top-level package."""
        return self.name.split(".")[0]


def modules(*rooms: str) -> list[Module]:
    """All modules of ``rooms`` (default: every room)."""
    found = []
    for room in rooms or ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            found.append(Module(name, path, text, ast.parse(text)))
    assert found, f"no modules in {rooms or ROOMS}"
    return found


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that ``module`` imports, wherever in the file."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = module.name.split(".")
    if module.path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *((node.module or "").split(".") if node.module else [])])


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of ``module``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its ``def`` on, its docstring not counted."""
    assert node.end_lineno is not None
    length = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        assert first.end_lineno is not None
        length -= first.end_lineno - first.lineno + 1
    return length
