"""Submitting and cancelling again and again: what is counted before and after must be the same."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import asdict, dataclass

import psutil

from orchestrator.processes import helpers_of
from orchestrator.ray_process import live_ray
from tests.e2e.faults.scene import Scene, faulty_job
from tests.e2e.jobs import submit

__all__ = ["Counted", "count", "cycles"]

_MOMENTS = ("SUBMITTED", "QUEUED", "STARTING", "RUNNING")


@dataclass(frozen=True, slots=True)
class Counted:
    """What the server and its Ray hold."""

    actors: int
    """Processes of ranks and supervisors."""
    server_processes: int
    """The server, its planner and its launcher."""
    threads: int
    """Of those."""
    handles: int
    """Their open files and sockets."""
    ports: int
    """On which the server and Ray's session listen, workers' own aside."""

    def more_than(self, before: Counted, slack: dict[str, int]) -> dict[str, tuple[int, int]]:
        """Return what has grown by more than its slack, as (before, now)."""
        pairs = ((name, getattr(before, name), now) for name, now in asdict(self).items())
        return {name: (then, now) for name, then, now in pairs if now > then + slack.get(name, 0)}


def count(scene: Scene) -> Counted:
    """Count now."""
    server = psutil.Process(scene.service.pid)
    family = [server, *helpers_of(server)]  # Ray is its child too, in a session of its own
    record = live_ray(scene.service.settings)
    assert record is not None
    listening: set[int] = set()
    for process in [*family, *scene.session(record.pid)]:
        try:
            idle = process.name().startswith("ray::")
            found = [] if idle else process.net_connections("tcp")
        except psutil.Error:
            continue
        listening |= {entry.laddr.port for entry in found if entry.status == psutil.CONN_LISTEN}
    return Counted(
        actors=len(scene.actors("Rank")) + len(scene.actors("Supervisor")),
        server_processes=len(family),
        threads=sum(process.num_threads() for process in family),
        handles=sum(process.num_fds() for process in family),
        ports=len(listening),
    )


def cycles(scene: Scene, number: int, chance: random.Random) -> Counted:
    """Submit and cancel ``number`` jobs, each in another state; return what there is when nothing is left of them.

    The first two are not compared with: they start what is started once.
    """
    before: Counted | None = None
    for index, moment in zip(range(number + 2), itertools.cycle(reversed(_MOMENTS)), strict=False):
        scene.job_id = submit(scene.client, faulty_job()).id
        later = _MOMENTS[_MOMENTS.index(moment) :]
        scene.wait(lambda job, later=later: job.state in later)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.5))  # the moment is what is varied
        scene.client.cancel(scene.job_id)
        deadline = time.monotonic() + 90
        while (job := scene.job()).state != "CANCELLED":
            assert time.monotonic() < deadline, f"{job.state}: {job.message} {scene.tail()}"
            time.sleep(0.1)
        scene.check_laws()
        if index == 1:
            before = _settled(scene, None)
    assert before is not None
    return _settled(scene, before)


def _settled(scene: Scene, before: Counted | None) -> Counted:
    """Count until nothing of a job is left; what stays above ``before`` for 20 s is a leak."""
    slack, deadline = {"threads": 4, "handles": 4}, time.monotonic() + 20
    while True:
        found = count(scene)
        grown = {} if before is None else found.more_than(before, slack)
        if found.actors == 0 and not grown:
            return found
        assert time.monotonic() < deadline, f"left after all jobs were cancelled: {found.actors} actors; {grown}"
        time.sleep(0.5)
