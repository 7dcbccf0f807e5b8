"""A service with one job that faults are injected into, and the laws that must hold whatever was injected."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from orchestrator import resources as r
from orchestrator.cli.own_service import OwnService
from orchestrator.client import Client
from orchestrator.errors import RequestRefused, ServiceUnreachable
from orchestrator.ray_process import live_ray
from tests.e2e.jobs import small, submit
from worker.contract.states import JobState, check_transition

__all__ = ["Scene", "Survived", "faulty_job", "playing"]


@dataclass(frozen=True, slots=True)
class Survived:
    """One fault and how long it took until steps were done again."""

    fault: str
    step: int
    """At which it was injected."""
    seconds: float
    restarted: bool

    def __str__(self) -> str:
        how = "another attempt" if self.restarted else "the same attempt"
        return f"{self.fault:<28} at step {self.step:>6}   {self.seconds:6.1f} s to the next step in {how}"


def faulty_job(**failure: Any) -> dict[str, Any]:
    """A job of two workers that goes on until it is stopped, saves every 10 steps and is restarted without end."""
    return small(
        training={"steps": 1_000_000},
        checkpoint={"every_steps": 10},
        failure={"infrastructure_restarts": 1000, "backoff_s": 0.2, "backoff_max_s": 0.5, **failure},
        watchdog={"silent_s": 4.0},
    )


@dataclass
class Scene:
    """The running service and its job. Calls are made again while the service is away."""

    service: OwnService
    client: Client
    job_id: str = ""
    survived: list[Survived] = field(default_factory=list)

    def patient(self, ask: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Return an answer of the service, asking again for a while when it gives none."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return ask()
            except (ServiceUnreachable, RequestRefused) as error:
                refused = isinstance(error, RequestRefused) and error.problem.status < 500
                if refused or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def job(self) -> r.JobResource:
        """Look at the job."""
        found = self.patient(lambda: self.client.job(self.job_id))
        assert isinstance(found, r.JobResource)
        return found

    def wait(self, condition: Callable[[r.JobResource], bool], timeout_s: float = 90.0) -> r.JobResource:
        """Wait until the job is as ``condition`` wants it."""
        deadline = time.monotonic() + timeout_s
        while not condition(job := self.job()):
            assert not job.terminal, f"{job.state} {job.reason}: {job.message} {job.rank_errors}"
            assert time.monotonic() < deadline, f"{job.state} after {timeout_s} s: {job.message} {self.tail()}"
            time.sleep(0.1)
        return job

    def tail(self) -> str:
        """The last events and the end of the log, for a failure."""
        events = [f"{e.kind}: {e.message[:300]}" for e in self.events()[-12:]]
        return "\n".join([*events, self.service.log_tail(2000)])

    def events(self) -> list[r.EventResource]:
        """All events of the job."""
        found: list[r.EventResource] = []
        while page := self.patient(
            partial(self.client.events, self.job_id, after=found[-1].seq if found else 0)
        ).events:
            found += page
        return found

    def inject(self, fault: Callable[[Scene], object], *, restarts: bool, timeout_s: float = 90.0) -> Survived:
        """Do the fault once the job has a checkpoint to come back to, and wait until the job does steps again."""
        before = self.wait(lambda job: job.state == "RUNNING" and job.progress.step >= job.progress.first_step + 12)
        number, step = len(before.attempts), before.progress.step
        fault(self)
        begin = time.monotonic()
        if restarts:
            done = lambda job: len(job.attempts) > number and job.state == "RUNNING" and job.progress.step > 0  # noqa: E731
        else:
            done = lambda job: job.progress.step > step  # noqa: E731
        after = self.wait(done, timeout_s)
        assert restarts or len(after.attempts) == number, f"a healthy attempt was given up: {self.tail()}"
        name = getattr(fault, "func", fault).__name__.replace("_", " ")
        self.survived.append(Survived(name, step, time.monotonic() - begin, restarts))
        print(self.survived[-1], flush=True)
        return self.survived[-1]

    def actors(self, kind: str) -> list[psutil.Process]:
        """Processes of this service's Ray whose title names an actor class."""
        record = live_ray(self.service.settings)
        found = []
        for process in [] if record is None else self.session(record.pid):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{kind}"):
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda process: process.pid)

    @staticmethod
    def session(leader: int) -> list[psutil.Process]:
        """Processes of a session."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == leader:
                    found.append(process)
        return found

    def check_laws(self) -> None:
        """No duplicate event, no illegal change of state, no step lost or done twice within an attempt."""
        events, job = self.events(), self.job()
        assert [event.seq for event in events] == list(range(1, len(events) + 1)), "each event once, in order"
        state = JobState.SUBMITTED
        for event in (event for event in events if event.kind == "state"):
            assert event.data["from"] == state, event
            check_transition(state, state := JobState(str(event.data["to"])))
        assert state == job.state
        reached = 0
        for attempt in job.attempts:
            steps = self.steps(attempt.number)
            assert attempt.dropped_reports == 0
            if not steps:
                continue
            assert steps == list(range(steps[0], steps[-1] + 1)), f"attempt {attempt.number}: {steps}"
            assert steps[0] <= reached + 1, f"attempt {attempt.number} began at {steps[0]} after {reached}"
            assert reached < 12 or steps[0] > reached - 25, f"it began at {steps[0]}, far behind {reached}"
            reached = steps[-1]

    def steps(self, attempt: int) -> list[int]:
        """Steps of an attempt as they were stored."""
        found: list[int] = []
        while True:
            after = found[-1] if found else 0
            page = self.patient(partial(self.client.metrics, self.job_id, after=after, attempt=attempt))
            if not page.points:
                return found
            found += [point.step for point in page.points]


@contextmanager
def playing(
    folder: Path, document: dict[str, Any] | None = None, *, num_cpus: int = 2, extra: dict[str, str] | None = None
) -> Iterator[Scene]:
    """A service (with ``extra`` in its environment) and its job; when they are taken down, nothing may be left."""
    with OwnService(folder, num_cpus=num_cpus, extra=extra) as service, service.client() as client:
        scene = Scene(service, client)
        if document is not None:
            scene.job_id = submit(client, document).id
        yield scene
    assert not service.left, f"processes are left: {service.left}"
