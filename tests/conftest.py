"""One real service (Ray, control plane, planner) for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.cli.own_service import OwnService


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give all that share the service to one process of ``-n 2 --dist loadgroup``; xdist reads it with the names."""
    if item.get_closest_marker("service") is not None:
        item.add_marker(pytest.mark.xdist_group("service"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the service's tests: their group is the longest."""
    items.sort(key=lambda item: item.get_closest_marker("service") is None)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnService]:
    with OwnService(tmp_path_factory.mktemp("service"), num_cpus=2) as running:
        yield running
    assert not running.left, f"the service left processes behind: {running.left}\n{running.log_tail()}"
