"""Two jobs that share a machine, a third that outranks them, and the one that gave way going on with half its GPUs.

    python -m benchmarks.gpu_two_jobs [--gpus 8] [--limit-s 420]     4 or 8; default: what the machine has
    python -m benchmarks.gpu_two_jobs --cpu [--gpus 4]               the same on CPUs with gloo and a tiny model

Through HTTP alone, on N GPUs: jobs ``left`` and ``right`` of N/2 workers train at once; ``urgent``, of N/4 workers and
a higher priority, makes one of them save and give way. That one cannot come back while the other two run, so its
checkpoint is continued by ``smaller`` on the N/4 GPUs that are left. In the end everything else is cancelled, the job
that gave way comes back at its own size, and must have the loss that ``smaller`` had in the first step after the
checkpoint. Any violated expectation ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._end_to_end_plan import Plan, decide_plan
from benchmarks._own_story import expect_given_back, running, tell_story
from benchmarks._watching import Gpus, Transcript, Violated, expect_in_use, gpus_now
from benchmarks.common import write_result
from orchestrator import resources as r
from orchestrator.cli.own_service import OwnService
from orchestrator.client import Client

__all__ = ["main"]

STEPS = 8
"""Steps of each job before the next thing happens."""


@dataclass(slots=True)
class Story:
    """The run: one service and its jobs."""

    plan: Plan
    gpus: int
    service: OwnService
    client: Client
    told: Transcript
    idle: Gpus | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Tell the whole story.

        Raises:
            Violated: an expectation did not hold.
            ServiceError: the service refused or did not answer.
        """
        half, quarter = self.gpus // 2, self.gpus // 4
        pair = [self.submit(name, half) for name in ("left", "right")]
        for job in pair:
            self.reach(job, STEPS)
        begun = [self.client.job(job.id).progress.step for job in pair]
        self.told.wait(lambda: all(now > then for now, then in zip(self.steps(pair), begun, strict=True)),
                       "both go on", timeout_s=60)  # fmt: skip
        self.told.say(f"  ok    two jobs of {half} workers train at once ({self.steps(pair)} steps)")
        expect_in_use(self.told, self.idle, 2 * half)
        urgent = self.submit("urgent", quarter, priority=10)
        self.reach(urgent, STEPS)
        gone, stayed = self.who_gave_way(pair)
        saved = self.client.checkpoints(gone.id).checkpoints[0]
        smaller = self.submit("smaller", quarter, resume=saved.path)
        self.reach(smaller, (saved.step or 0) + STEPS)
        self.told.expect(not self.client.job(stayed.id).terminal, "the other job was not disturbed")
        for job in (urgent, stayed, smaller):
            self.cancel(job)
        self.reach(gone, (saved.step or 0) + STEPS)
        self.compare(gone, smaller, saved.step or 0)
        self.cancel(gone)
        expect_given_back(self.told, self.service.url, self.idle)

    def submit(self, name: str, workers: int, *, priority: int = 0, resume: str | None = None) -> r.JobResource:
        """Submit a job."""
        document = json.loads(self.plan.spec(name, workers, resume)) | {"priority": priority}
        job = self.client.submit(json.dumps(document))
        self.told.say(f"POST /v1/jobs: {name} ({job.id}) on {workers} workers, priority {priority}")
        return job

    def steps(self, jobs: Sequence[r.JobResource]) -> list[int]:
        """Return how far ``jobs`` are."""
        return [self.client.job(job.id).progress.step for job in jobs]

    def reach(self, job: r.JobResource, step: int) -> None:
        """Wait until a job has done ``step``, and expect that it did what its plan says."""
        began = time.monotonic()

        def done() -> bool:
            now = self.client.job(job.id)
            if now.terminal:
                raise Violated(f"expected: {job.name} runs; found: {now.state} {now.reason}: {now.message}")
            return now.progress.step >= step

        self.told.wait(done, f"{job.name} does step {step}", timeout_s=180)
        self.told.wait(lambda: self.client.routes(job.id).verification is not None, "it is verified", timeout_s=30)
        verified = self.client.routes(job.id).verification
        assert verified is not None
        self.told.expect(verified.status == "True", f"{job.name}: as planned", verified.message)
        workers = self.client.job(job.id).spec.world_size
        seconds = time.monotonic() - began
        self.rows.append({"job": job.name, "workers": workers, "step": step, "seconds": seconds})

    def who_gave_way(self, pair: Sequence[r.JobResource]) -> tuple[r.JobResource, r.JobResource]:
        """Return the job that was preempted, which must have saved, and the one that was not."""
        gone = [job for job in pair if "preempted" in self.reasons(job)]
        names = [job.name for job in gone]
        self.told.expect(len(gone) == 1, "one job gave way, and no more", names)
        saved = self.client.checkpoints(gone[0].id).checkpoints
        self.told.expect(bool(saved), f"{names[0]} saved before it left", saved[0].step if saved else "nothing")
        return gone[0], next(job for job in pair if job.id != gone[0].id)

    def reasons(self, job: r.JobResource) -> list[str | None]:
        """Return why the attempts of a job ended."""
        return [attempt.end_reason for attempt in self.client.job(job.id).attempts]

    def compare(self, one: r.JobResource, other: r.JobResource, after: int) -> None:
        """Expect the same loss of both in the first step after the checkpoint, on different numbers of workers."""
        losses = [self.client.metrics(job.id, after=after, limit=1).points[0].loss for job in (one, other)]
        apart = abs(losses[0] - losses[1]) / losses[0]
        law = f"step {after + 1} has the same loss on both sizes, to {self.plan.first_loss_tolerance:g}"
        self.told.expect(apart <= self.plan.first_loss_tolerance, law, losses)

    def cancel(self, job: r.JobResource) -> None:
        """Cancel a job and wait for its end."""
        self.client.cancel(job.id)
        self.told.wait(lambda: self.client.job(job.id).terminal, f"{job.name} ends", timeout_s=60)
        self.told.say(f"POST /v1/jobs/{job.id}:cancel: {self.client.job(job.id).state}")


def _tell(options: argparse.Namespace, told: Transcript, state_dir: Path) -> Story:
    idle = None if options.cpu else gpus_now()
    have = 4 if idle is None else len(idle.used_bytes)
    gpus = options.gpus or (8 if have >= 8 else 4)
    if idle is not None and gpus > have:
        raise Violated(f"expected: {gpus} GPUs; found: {have}. --cpu runs the same story without any")
    service = OwnService(state_dir, num_cpus=gpus if options.cpu else None)
    with running(service, told) as client:
        story = Story(decide_plan(2, cpu=options.cpu), gpus, service, client, told, idle)
        story.run()
    return story


def main(arguments: Sequence[str]) -> int:
    """Run it; 0 when every expectation held."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_two_jobs")
    parser.add_argument("--gpus", type=int, choices=(4, 8))
    parser.add_argument("--cpu", action="store_true", help="gloo, a tiny model, kernels that run everywhere")
    parser.add_argument("--limit-s", type=float, default=420.0)
    options = parser.parse_args(arguments)
    ended = tell_story(options.limit_s, lambda told, state_dir: _tell(options, told, state_dir))
    if ended is None:
        return 1
    story, told = ended
    write_result(f"gpu_two_jobs-{story.gpus}", story.rows, transcript=told.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
