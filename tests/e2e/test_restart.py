"""The control plane is killed under a running job: it finds the job again and no step is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestrator.cli.own_service import OwnService
from tests.e2e.jobs import small, submit, wait_for, wait_until_ended

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]


def test_killed_and_started_again_it_loses_no_step(tmp_path_factory: pytest.TempPathFactory) -> None:
    steps = 200
    folder: Path = tmp_path_factory.mktemp("killed")
    with OwnService(folder, num_cpus=2) as service:
        with service.client() as client:
            job = submit(client, small(training={"steps": steps}))
            wait_for(client, job.id, lambda seen: seen.progress.step >= 20)
        os.kill(service.pid, signal.SIGKILL)
        service.start()
        with service.client() as client:
            ended = wait_until_ended(client, job.id)
            seen: list[int] = []
            while page := client.metrics(job.id, after=seen[-1] if seen else 0).points:
                seen += [point.step for point in page]
    assert (ended.state, ended.reason) == ("SUCCEEDED", "completed"), ended.message
    assert seen == list(range(1, steps + 1)), "every step once, in order"
    assert ended.attempts[0].dropped_reports == 0 and len(ended.attempts) == 1
    assert not service.left
