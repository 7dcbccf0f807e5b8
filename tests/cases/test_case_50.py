"""Case 50: setting up fails, and the job says it is pending, or is tried for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.own_service import OwnService
from tests.e2e.jobs import small, submit, wait_for, wait_until_ended

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]


def test_a_set_up_that_fails_on_the_workers_says_so_and_is_not_tried_again(service: OwnService, tmp_path: Path) -> None:
    """The corpus is there when the job is planned and gone when its workers start."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a line of text\n" * 500)
    with service.client() as client:
        first = submit(client, small(training={"steps": 100_000}))
        wait_for(client, first.id, lambda job: job.progress.step >= 1)
        second = submit(client, small(data={"files": [str(corpus)]}))
        wait_for(client, second.id, lambda job: job.state == "QUEUED")
        corpus.unlink()
        client.cancel(first.id)
        ended = wait_until_ended(client, second.id)
    assert (ended.state, ended.reason, ended.blame) == ("FAILED", "setup_failed", "user")
    assert len(ended.attempts) == 1
    assert str(corpus) in ended.message or any(str(corpus) in group.message for group in ended.rank_errors)
