"""Case 17: a request that the cluster can never satisfy waits without end or reason."""

from __future__ import annotations

import pytest

from orchestrator.cli.own_service import OwnService
from tests.e2e.jobs import small, submit, wait_until_ended

pytestmark = pytest.mark.service


def test_an_impossible_request_fails_at_once_with_asked_and_available(service: OwnService) -> None:
    with service.client() as client:
        job = submit(client, small(resources={"cpus_per_worker": 64}))
        ended = wait_until_ended(client, job.id, timeout_s=30)
    assert (ended.state, ended.reason, ended.blame) == ("FAILED", "infeasible", "user")
    assert not ended.attempts
    assert "64" in ended.message and "2" in ended.message
    assert ended.errors and ended.errors[0].pointer.startswith("/")
