"""A few faults in one service start: whatever is done to it, the job goes on and nothing is lost or done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.faults import injuries
from tests.e2e.faults.scene import faulty_job, playing

pytestmark = [pytest.mark.service, pytest.mark.timeout(400)]


def test_a_job_survives_what_is_done_to_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("faults")
    with playing(folder, faulty_job()) as scene:
        for _ in range(2):
            assert scene.inject(injuries.control_plane_killed, restarts=False).seconds < 10
        scene.inject(injuries.database_locked, restarts=False)
        scene.inject(injuries.supervisor_killed, restarts=True)
        scene.inject(injuries.worker_killed, restarts=True)
        scene.wait(lambda job: job.progress.step >= job.progress.first_step + 12)
        step = scene.job().progress.step
        scene.client.pause(scene.job_id)
        paused = scene.wait(lambda job: job.state == "PAUSED")
        assert [attempt.end_reason for attempt in paused.attempts] == ["worker_lost", "worker_lost", "paused"]
        scene.check_laws()
        saved = [event for event in scene.events() if event.kind == "checkpoint_saved"]
        assert int(str(saved[-1].data["step"])) == paused.progress.step >= step, "it saved before it left"
        assert not scene.actors("Rank") and not scene.actors("Supervisor"), "a paused job holds nothing"
        assert scene.client.cancel(scene.job_id).state == "CANCELLED"
