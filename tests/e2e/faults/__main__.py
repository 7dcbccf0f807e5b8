"""The long round: ``python -m tests.e2e.faults``. Prints what was injected and what survived; exits with 1 unless all.

Kills the control plane at random moments under a running job, and does everything else to it a few times.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from orchestrator import resources as r
from tests.e2e.faults import injuries
from tests.e2e.faults.cycles import cycles
from tests.e2e.faults.scene import Scene, faulty_job, playing
from tests.e2e.jobs import submit
from tests.orchestrator.postgres import find_postgres, running_postgres

RESTARTING = (
    injuries.worker_killed, injuries.worker_stopped, injuries.worker_exits, injuries.supervisor_killed,
    injuries.ray_killed,
)  # fmt: skip
FATAL = (injuries.worker_raises, injuries.memory_exhausted)


def _kill_often(folder: Path, number: int, chance: random.Random) -> str:
    """Kill the control plane at random moments of one attempt."""
    slowest = 0.0
    with playing(folder, faulty_job()) as scene:
        for _ in range(number):
            time.sleep(chance.uniform(0.0, 2.0))  # the moment is what is varied
            slowest = max(slowest, scene.inject(injuries.control_plane_killed, restarts=False).seconds)
            assert slowest < 10, f"it took {slowest:.1f} s to attach again"
        scene.check_laws()
        assert len(scene.job().attempts) == 1
    return f"{number} kills of the control plane survived in one attempt, the slowest in {slowest:.1f} s"


def _everything_else(folder: Path, number: int, chance: random.Random) -> str:
    with playing(folder, faulty_job()) as scene:
        for _ in range(number):
            for fault in chance.sample(RESTARTING, len(RESTARTING)):
                scene.inject(fault, restarts=True, timeout_s=180.0)
            scene.inject(injuries.database_locked, restarts=False)
            scene.inject(injuries.supervisor_stopped, restarts=False)
        scene.check_laws()
        count = len(scene.survived)
    return f"{count} other faults survived"


def _postgres_killed(folder: Path, number: int) -> str:
    """PostgreSQL dies at once and starts anew under a running job; needs Debian's package ``postgresql``."""
    programs = find_postgres()
    if programs is None:
        return "nothing: PostgreSQL is not installed, so it was not killed"
    with running_postgres(programs) as postgres:
        database = {"DMUON_DATABASE_URL": postgres.empty()}
        with playing(folder, faulty_job(), extra=database) as scene:
            for _ in range(number):
                scene.inject(partial(injuries.database_killed, postgres), restarts=False)
            scene.inject(injuries.control_plane_killed, restarts=False)
            scene.check_laws()
    return f"{number} deaths of PostgreSQL survived"


def _node_lost(folder: Path) -> str:
    """Each rank on a node of its own; one node dies, and the job waits until there is another."""
    with playing(folder, num_cpus=1) as scene:
        with injuries.second_node(scene) as kill:
            scene.job_id = _submit_when_there_is_room(scene)
            scene.wait(lambda job: job.progress.step >= 12)
            kill()
            begin = time.monotonic()
            scene.wait(lambda job: job.state in ("RESTARTING", "QUEUED"))
            seconds = time.monotonic() - begin
            time.sleep(3.0)  # long enough for a wrong decision about a cluster that has become too small
            job = scene.job()
            assert job.state == "QUEUED" and job.attempts[0].end_reason == "node_lost", f"{job.state} {job.attempts}"
        with injuries.second_node(scene):
            scene.wait(lambda job: job.state == "RUNNING" and job.progress.first_step >= 10, timeout_s=120.0)
            scene.check_laws()
            scene.client.cancel(scene.job_id)
            _ended(scene)
    return f"a lost node was told after {seconds:.1f} s, and the job went on when there was another"


def _submit_when_there_is_room(scene: Scene) -> str:
    """Submit until the second node has joined: before that the job would be refused for good."""
    deadline = time.monotonic() + 60
    while True:
        scene.job_id = submit(scene.client, faulty_job()).id
        while (job := scene.job()).state in ("SUBMITTED", "QUEUED"):
            time.sleep(0.2)
        if not job.terminal:
            return job.id
        assert time.monotonic() < deadline, job.message
        time.sleep(1.0)


def _cycles(folder: Path, chance: random.Random) -> str:
    with playing(folder) as scene:
        found = cycles(scene, 20, chance)
    return f"20 jobs submitted and cancelled left nothing: {found}"


def _fatal(folder: Path, fault: Callable[[Scene], None]) -> str:
    """What is the job's own fault is told and not tried again."""
    with playing(folder, faulty_job()) as scene:
        scene.wait(lambda job: job.progress.step >= 5)
        fault(scene)
        job = _ended(scene)
        assert (job.state, job.reason, len(job.attempts)) == ("FAILED", "user_error", 1), f"{job.reason}: {job.message}"
        return f"{fault.__name__} ended the job as {job.reason}: {job.message[:150]}"


def _silent_supervisor(folder: Path) -> str:
    """A job that is paused, then cancelled while its supervisor is stopped is ended by force, and what it did meanwhile
    is kept; after the pause it goes on from its newest checkpoint."""
    with playing(folder, faulty_job(stop_patience_s=3)) as scene:
        scene.wait(lambda _: "checkpoint_saved" in [event.kind for event in scene.events()])
        scene.actors("Supervisor")[0].suspend()
        scene.client.pause(scene.job_id)
        paused = scene.wait(lambda job: job.state == "PAUSED")
        assert [attempt.end_reason for attempt in paused.attempts] == ["paused"]
        assert not [*scene.actors("Rank"), *scene.actors("Supervisor")]
        scene.client.resume(scene.job_id)
        scene.wait(lambda job: len(job.attempts) == 2 and job.progress.step >= paused.progress.step + 5)
        scene.actors("Supervisor")[0].suspend()
        step = scene.job().progress.step
        scene.client.cancel(scene.job_id)
        job = _ended(scene)
        assert (job.state, len(job.attempts)) == ("CANCELLED", 2), f"{job.state} {job.reason}: {job.message}"
        assert [event.kind for event in scene.events()].count("ended_by_force") == 2
        assert job.progress.step > step and not [*scene.actors("Rank"), *scene.actors("Supervisor")]
        scene.check_laws()
        begin = scene.steps(2)[0]
        return (
            f"a silent supervisor was ended by force: after a pause at step {paused.progress.step} the job went on "
            f"with step {begin}; after the cancellation {job.progress.step - step} steps that it had not told are kept"
        )


def _ended(scene: Scene) -> r.JobResource:
    deadline = time.monotonic() + 60
    while not (job := scene.job()).terminal:
        assert time.monotonic() < deadline, scene.tail()
        time.sleep(0.2)
    return job


def _rounds(num_kills: int, num_rounds: int, chance: random.Random) -> dict[str, Callable[[Path], str]]:
    rounds: dict[str, Callable[[Path], str]] = {}
    if num_kills:
        rounds["kills of the control plane"] = lambda folder: _kill_often(folder, num_kills, chance)
    if num_rounds:
        rounds["other faults"] = lambda folder: _everything_else(folder, num_rounds, chance)
        rounds["deaths of PostgreSQL"] = lambda folder: _postgres_killed(folder, num_rounds)
        rounds["a lost node"] = _node_lost
        rounds["a silent supervisor"] = _silent_supervisor
        rounds["submit and cancel"] = lambda folder: _cycles(folder, chance)
        for fault in FATAL:
            rounds[fault.__name__] = partial(_fatal, fault=fault)
    return rounds


def main() -> int:
    """Run all rounds; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.faults")
    parser.add_argument("--kills", type=int, default=50, help="kills of the control plane")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of everything else")
    parser.add_argument("--only", default="", help="rounds whose name contains this")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    chance, failures = random.Random(seed), 0
    rounds = _rounds(options.kills, options.rounds, chance)
    rounds = {name: play for name, play in rounds.items() if options.only in name}
    print(f"seed {seed}", flush=True)
    for name, play in rounds.items():
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            try:
                print(f"survived: {play(Path(folder))}", flush=True)
            except AssertionError as error:
                failures += 1
                print(f"NOT SURVIVED: {name}: {error}", flush=True)
    print("everything survived" if not failures else f"{failures} of {len(rounds)} rounds failed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
