"""Case 9: every error survives a pickle, and every code is its own."""

from __future__ import annotations

import pickle

import pytest

from orchestrator import errors
from orchestrator.errors import Problem, RequestRefused, ServiceError
from worker.contract.errors import FieldError


def classes(root: type[ServiceError]) -> list[type[ServiceError]]:
    return [root] + [found for child in root.__subclasses__() for found in classes(child)]


@pytest.mark.parametrize("kind", classes(ServiceError))
def test_case_9_pickle(kind: type[ServiceError]) -> None:
    field = FieldError(pointer="/a", code="c", message="m", suggestion="s")
    first: ServiceError
    if kind is RequestRefused:
        first = RequestRefused(Problem.of(errors.NotFound("what", [field])))
    else:
        first = kind("what, which and the cure", [field])
    again = pickle.loads(pickle.dumps(first))
    assert type(again) is kind and str(again) == str(first) and again.errors == (field,)


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in classes(ServiceError)]
    assert len(set(codes)) == len(codes)
    assert {kind.__name__ for kind in classes(ServiceError)} <= set(errors.__all__)
