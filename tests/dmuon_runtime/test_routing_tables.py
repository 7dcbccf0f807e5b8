"""The routing of nine real architectures, as reviewed: a change of any line has to be looked at."""

from __future__ import annotations

import pytest

from tests.multiproc.architectures import ARCHITECTURES, TABLES, routing_table


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_routing_is_the_reviewed_one(name: str) -> None:
    path = TABLES / f"{name}.txt"
    reviewed = path.read_text() if path.exists() else ""
    found = routing_table(ARCHITECTURES[name])
    changed = sorted(set(found.splitlines()) ^ set(reviewed.splitlines()))
    assert found == reviewed, (
        f"the routing of {name} differs from {path.name} in:\n" + "\n".join(changed) + "\nIf it should, run "
        "python -m tests.multiproc.architectures and review the difference before you commit it"
    )


def test_no_table_is_left_over() -> None:
    assert {path.stem for path in TABLES.glob("*.txt")} == set(ARCHITECTURES)
