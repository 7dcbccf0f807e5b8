"""Case 9: the real error is lost between worker and control plane, because its class cannot be rebuilt."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

from orchestrator.errors import Problem
from tests.architecture.source import ROOMS
from worker.contract.errors import ErrorValue, FieldError


def own_error_classes() -> Iterator[type[Exception]]:
    """Every exception class that a room defines, found by importing all of its modules."""
    seen = set()
    for room in ROOMS:
        package = importlib.import_module(room)
        for info in pkgutil.walk_packages(package.__path__, f"{room}."):
            if "migrations" in info.name or info.name.endswith("__main__") or "triton" in info.name:
                continue
            for _, value in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
                if issubclass(value, Exception) and value.__module__.split(".")[0] == room and value not in seen:
                    seen.add(value)
                    yield value


def example_of(kind: type[Exception]) -> Exception:
    """An instance, its arguments guessed from the annotations of the constructor."""
    if "__init__" not in {name for base in kind.__mro__ if base.__module__ != "builtins" for name in vars(base)}:
        return kind("a message")
    samples: dict[str, object] = {"str": "text", "int": 3, "float": 0.5, "bool": True, "str | None": "text"}
    samples |= {"Sequence[str]": ("a", "b"), "Sequence[FieldError]": (FieldError(pointer="/a", code="c", message="m"),)}
    samples |= {"Problem": Problem(type="t", title="a title", status=422, detail="d", instance="i", code="c")}
    arguments, keywords = [], {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.default is not parameter.empty:
            continue
        value = samples.get(str(parameter.annotation), "text")
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[name] = value
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            arguments.append(value)
    return kind(*arguments, **keywords)


@pytest.mark.parametrize("kind", sorted(own_error_classes(), key=str), ids=lambda kind: kind.__qualname__)
def test_every_own_error_survives_pickling(kind: type[Exception]) -> None:
    error = example_of(kind)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert back.args == error.args
    assert vars(back) == vars(error)


class WithCode(Exception):
    """A user's exception that plain pickling cannot rebuild."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"failed with code {code}")
        self.code = code


def test_a_foreign_error_keeps_class_message_and_fields() -> None:
    error = WithCode(code=7)
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(error))
    value = pickle.loads(pickle.dumps(ErrorValue.from_exception(error, rank=1)))
    assert value.type.endswith("WithCode") and value.message == "failed with code 7"
    assert value.fields == {"code": "7"} and value.rank == 1
