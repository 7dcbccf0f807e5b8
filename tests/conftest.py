"""One real service (Ray, control plane, planner) for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.cli.own_service import OwnService


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnService]:
    with OwnService(tmp_path_factory.mktemp("service"), num_cpus=2) as running:
        yield running
    assert not running.left, f"the service left processes behind: {running.left}\n{running.log_tail()}"
