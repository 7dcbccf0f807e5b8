"""Sizes that keep the code readable: the tail matters, not the average."""

from __future__ import annotations

import ast
import statistics

import pytest

from tests.architecture.source import ROOMS, code_lines, functions, modules

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 40
MAX_P90_FUNCTION_LINES = 27
MAX_PUBLIC_METHODS = 12


def test_modules_are_short() -> None:
    long = {m.name: n for m in modules() if (n := m.text.count("\n")) > MAX_MODULE_LINES}
    assert not long, f"modules of more than {MAX_MODULE_LINES} lines: {long}"


def test_functions_are_short() -> None:
    long = {
        f"{m.name}:{f.name}": n for m in modules() for f in functions(m) if (n := code_lines(f)) > MAX_FUNCTION_LINES
    }
    assert not long, f"functions of more than {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("room", ROOMS)
def test_ninetieth_percentile(room: str) -> None:
    lengths = [code_lines(f) for m in modules(room) for f in functions(m)]
    p90 = statistics.quantiles(lengths, n=10)[-1]
    assert p90 <= MAX_P90_FUNCTION_LINES, f"{room}: 90th percentile of function lengths is {p90}"


def test_classes_have_few_public_methods() -> None:
    wide = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                methods = [f for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
                public = [f.name for f in methods if not f.name.startswith("_")]
                if len(public) > MAX_PUBLIC_METHODS:
                    wide[f"{module.name}:{node.name}"] = len(public)
    assert not wide, f"classes with more than {MAX_PUBLIC_METHODS} public methods: {wide}"
