"""The whole service on GPUs, through HTTP alone: train, look, swap a kernel, stop, go on with another number of GPUs.

    python -m benchmarks.gpu_end_to_end [--gpus N] [--limit-s 270]      N = 1 or 2; default: what the machine has
    python -m benchmarks.gpu_end_to_end --share                         two workers on one GPU, and one after them
    python -m benchmarks.gpu_end_to_end --cpu [--gpus N]                the same on CPUs with gloo and a tiny model

It brings up a service of its own (state directory, port, Ray) and takes it down again, whatever happens. Jobs:

1. ``first`` on N workers: overlap by route and phase from ``/metrics``; kernel quack -> cublas -> quack while it runs
   (on CPUs blocked -> cublas -> blocked), each change at one step on all ranks; pause, which saves.
2. ``other-size`` on the other number of workers (2 -> 1, or 1 -> 1) goes on from that checkpoint; cancel, which saves.
3. ``back`` on N workers goes on from *that* checkpoint; cancel.
4. ``first`` is resumed and does the same steps again: its losses are what the other two must have had.

After every stop GPUs must be free (no process, memory back) and Ray must have its resources back; at the end no
process may be left. Any violated expectation, and being later than ``--limit-s``, ends it with exit code 1; ending all
that was started takes up to 20 s more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._end_to_end_plan import Plan, decide_plan
from benchmarks._own_story import expect_given_back, running, tell_story
from benchmarks._watching import (
    Gpus,
    Scrape,
    Transcript,
    Violated,
    expect_free,
    expect_in_use,
    gpus_now,
    overlap_rows,
    scrape,
)
from benchmarks.common import write_result
from orchestrator import resources as r
from orchestrator.cli.own_service import OwnService
from orchestrator.client import Client
from worker.contract.kernels import Kernel

__all__ = ["main"]

WATCHED_STEPS = 12
"""Steps over which overlap is measured, and which are done after each resumption."""
ON_THE_WAY = ("placed", "workers_started", "group_formed", "plan_confirmed", "routes_verified")
"""Events of an attempt until its first step is done."""


@dataclass(slots=True)
class Story:
    """The run: one service, its jobs, and what was seen."""

    plan: Plan
    service: OwnService
    client: Client
    told: Transcript
    idle: Gpus | None
    """The GPUs before anything was started; None on CPUs."""
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    """Loss by step of each stretch of training."""

    def run(self) -> None:
        """Tell the whole story.

        Raises:
            Violated: an expectation did not hold.
            ServiceError: the service refused or did not answer.
        """
        workers, other = self.plan.sizes
        first = self.start("first", workers)
        self.watch(first)
        if self.idle is not None:
            self.look(first, workers)
        for kernel in reversed(self.plan.kernels):
            self.swap(first, kernel)
        self.pause(first)
        saved = self.checkpoint(first)
        second = self.start("other-size", other, saved)
        self.cancel(second)
        third = self.start("back", workers, self.checkpoint(second))
        self.cancel(third)
        self.told.say()
        self.told.say(f"POST /v1/jobs/{first}:resume, on {workers} workers; it does the steps of the other two again")
        self.client.resume(first)
        begin = saved.step or 0
        self.reach(first, "first, resumed", workers, begin, steps=max(self.losses["back"]) - begin)
        self.cancel(first)
        self.compare_losses()

    def start(self, name: str, workers: int, saved: r.CheckpointEntry | None = None) -> str:
        """Submit a job, wait until it trains, check what it continued from and that it does what its plan says."""
        path = None if saved is None else saved.path
        after = "" if saved is None else f", from the checkpoint after step {saved.step}"
        self.told.say()
        self.told.say(f"POST /v1/jobs: {name} on {workers} workers{after}")
        job = self.client.submit(self.plan.spec(name, workers, path))
        self.reach(job.id, name, workers, 0 if saved is None else saved.step or 0)
        if saved is not None:
            resumed = [event for event in self.client.events(job.id).events if event.kind == "resumed"]
            self.told.expect(
                [event.data["step"] for event in resumed] == [saved.step], "it went on where the other job stopped",
                resumed[0].message if resumed else "it did not say that it resumed",
            )  # fmt: skip
        return job.id

    def reach(self, job_id: str, name: str, workers: int, first: int, steps: int = WATCHED_STEPS) -> None:
        """Wait until ``steps`` steps after ``first`` are done, and note them."""
        began, running = time.monotonic(), [0.0]

        def done() -> bool:
            job = self.alive(job_id)
            running[0] = running[0] or (time.monotonic() - began if job.progress.step > first else 0.0)
            return job.progress.step >= first + steps

        self.told.wait(done, f"{name} does step {first + steps}", timeout_s=180)
        points = self.points(job_id, first, steps)
        self.losses[name] = {point.step: point.loss for point in points}
        milliseconds = statistics.median(point.step_seconds for point in points[2:]) * 1e3
        each_once = [point.step for point in points] == list(range(first + 1, first + steps + 1))
        self.told.expect(each_once, "no step is missing or twice", f"steps {points[0].step} to {points[-1].step}")
        self.told.say(f"  first step after {running[0]:.1f} s; {milliseconds:.1f} ms a step; "
                      f"loss {points[0].loss:.4f} -> {points[-1].loss:.4f}")  # fmt: skip
        self.say_when(job_id)
        self.verified(job_id)
        used = expect_in_use(self.told, self.idle, self.plan.gpus(workers))
        self.rows.append(
            {
                "stretch": name, "job": job_id, "workers": workers, "first step": points[0].step,
                "last step": points[-1].step, "seconds to the first step": running[0], "step ms": milliseconds,
                "losses": [point.loss for point in points], "gpu bytes": used,
            }
        )  # fmt: skip

    def say_when(self, job_id: str) -> None:
        """Show where the time to the first step of the last attempt went."""
        events = [event for event in self.client.events(job_id).events if event.kind in ON_THE_WAY]
        begin = max(index for index, event in enumerate(events) if event.kind == ON_THE_WAY[0])
        marks = [f"{event.kind} {event.at - events[begin].at:.1f}" for event in events[begin:]]
        self.told.say(f"  seconds: {', '.join(marks)}")

    def alive(self, job_id: str) -> r.JobResource:
        """Return the job.

        Raises:
            Violated: it has ended.
        """
        job = self.client.job(job_id)
        if job.terminal:
            errors = [f"{error.type}: {error.message}" for error in job.rank_errors]
            errors += [f"{error.pointer}: {error.message}" for error in job.errors]
            raise Violated(f"expected: job {job.name} runs; found: {job.state} {job.reason}: {job.message} {errors}")
        return job

    def points(self, job_id: str, after: int, number: int) -> Sequence[r.StepPoint]:
        """Return ``number`` steps that follow one, once all ranks have reported them."""
        workers = self.client.job(job_id).spec.world_size
        found: list[r.StepPoint] = []

        def complete() -> bool:
            found[:] = self.client.metrics(job_id, after=after, limit=number).points
            return len(found) == number and all(point.ranks == workers for point in found)

        self.told.wait(complete, f"all ranks of {job_id} report {number} steps after {after}", timeout_s=60)
        return found

    def verified(self, job_id: str) -> None:
        """Expect that what ran is what the plan says, by the service's own comparison."""

        def known() -> bool:
            return self.client.routes(job_id).verification is not None

        self.told.wait(known, "the service compares the job with its plan", timeout_s=30)
        condition = self.client.routes(job_id).verification
        assert condition is not None
        self.told.expect(condition.status == "True", "matrices and bytes are as planned", condition.message)

    def watch(self, job_id: str) -> None:
        """Show from /metrics what the wires did over some steps, and which kernel was launched."""
        before, at = self.scrape(), self.client.job(job_id).progress.step
        self.told.wait(lambda: self.alive(job_id).progress.step >= at + WATCHED_STEPS, "more steps", timeout_s=60)
        after = self.scrape()
        self.told.say(f"GET /metrics, between two scrapes at least {WATCHED_STEPS} steps apart")
        rows = overlap_rows(before, after, job_id)
        self.facts["overlap"] = rows
        if rows:
            self.told.table(tuple(rows[0]), [tuple("-" if v is None else v for v in row.values()) for row in rows])
        moved = sum(int(str(row["bytes"])) for row in rows)
        self.told.expect((moved > 0) == (self.plan.sizes[0] > 1), "there is traffic where there are others", moved)
        launched = _grown(before, after, "dmuon_ns_launches_total", job_id)
        self.facts["launches"] = launched
        only = {kernel for kernel, number in launched.items() if number} == {str(self.plan.kernels[0])}
        self.told.expect(only, f"{self.plan.kernels[0]} alone was launched", launched)

    def look(self, job_id: str, workers: int) -> None:
        """Expect that the service knows who holds the GPUs: this job's workers and nobody else."""
        asked = time.time()
        self.told.wait(lambda: (self.client.gpus().at or 0.0) > asked, "a look at who holds the GPUs", timeout_s=40)
        found = self.client.gpus().holders
        text = "; ".join(f"process {one.pid} on GPU {one.gpu}: {one.standing}, {one.why}" for one in found)
        named = [one for one in found if one.standing != "unknown"]
        own = {one.pid for one in named if one.standing == "live" and job_id in one.why}
        right = own == {one.pid for one in named} and len(own) == workers
        unknown = bool(found) and not named
        self.told.expect(
            right or unknown, "the GPUs are its workers' alone, or it cannot be told here", text or "nobody"
        )

    def swap(self, job_id: str, kernel: Kernel) -> None:
        """Swap the kernel; expect that all ranks changed at one step, and that nothing else was launched before it."""
        previous = next(other for other in self.plan.kernels if other != kernel)
        before, began = self.scrape(), time.monotonic()
        self.told.say()
        self.told.say(f"POST /v1/jobs/{job_id}/kernel-swaps: {previous} -> {kernel}")
        asked = [self.client.swap(job_id, r.SwapRequest(kernel=kernel, reason="end to end"))]

        def final() -> bool:
            self.alive(job_id)
            asked[0] = self.client.swap_state(job_id, asked[0].id)
            return asked[0].final

        self.told.wait(final, "the swap ends", timeout_s=130)
        done = asked[0]
        self.told.expect(done.state == "committed" and done.step is not None, "the swap was committed", done.message)
        step = done.step or 0
        points = self.points(job_id, step - 4, 8)  # totals after the steps step-3 to step+4
        table = [(later.step, _matrices(earlier, later)) for earlier, later in pairwise(points)]
        rows = [(at, counts.get(previous, 0), counts.get(kernel, 0)) for at, counts in table]
        self.told.table(("matrices in step", str(previous), str(kernel)), list(rows))
        planned = self.planned_matrices(job_id)
        right = all(counts == {str(kernel if at >= step else previous): planned} for at, counts in table)
        self.told.expect(right, f"from step {step} on {kernel} orthogonalised all matrices, before it none", planned)
        grown = _grown(before, self.scrape(), "dmuon_ns_matrices_total", job_id)
        self.told.expect(grown.get(str(kernel), 0) > 0, f"/metrics counts matrices of {kernel}", grown)
        epochs = set(self.scrape().by("dmuon_kernel_epoch", "rank", job=job_id).values())
        self.told.expect(epochs == {float(done.epoch or 0)}, "all ranks are in the epoch of the swap", epochs)
        self.verified(job_id)
        seconds = time.monotonic() - began
        self.facts.setdefault("swaps", []).append(
            {"from": previous, "to": kernel, "step": step, "epoch": done.epoch, "seconds": seconds}
        )

    def planned_matrices(self, job_id: str) -> int:
        """Return how many matrices a step has."""
        plan = self.client.job(job_id).plan
        assert plan is not None and plan.ns_matrices is not None
        return plan.ns_matrices

    def pause(self, job_id: str) -> None:
        """Pause; expect that everything was given back."""
        self.told.say()
        self.told.say(f"POST /v1/jobs/{job_id}:pause")
        self.client.pause(job_id)
        self.told.wait(lambda: self.alive(job_id).state == "PAUSED", "the job is paused", timeout_s=60)
        self.given_back()

    def cancel(self, job_id: str) -> None:
        """Cancel; expect that everything was given back."""
        self.told.say(f"POST /v1/jobs/{job_id}:cancel")
        self.client.cancel(job_id)
        self.told.wait(lambda: self.client.job(job_id).terminal, "the job ends", timeout_s=60)
        job = self.client.job(job_id)
        self.told.expect((job.state, job.reason) == ("CANCELLED", "cancelled"), "it was cancelled", job.message)
        self.given_back()

    def checkpoint(self, job_id: str) -> r.CheckpointEntry:
        """Return the newest checkpoint of a job, which must be there."""
        entries = self.client.checkpoints(job_id).checkpoints
        self.told.expect(bool(entries) and entries[0].present is not False, "a checkpoint was saved",
                         f"step {entries[0].step}, {entries[0].bytes} bytes" if entries else "none")  # fmt: skip
        return entries[0]

    def given_back(self) -> None:
        """Expect that everything was given back."""
        expect_given_back(self.told, self.service.url, self.idle)

    def compare_losses(self) -> None:
        """Expect the same losses on all numbers of workers, far below the first of all."""
        self.told.say()
        self.told.say("losses of the same steps")
        reference = self.losses["first, resumed"]
        rows = [
            (step, name, loss, reference[step], abs(loss - reference[step]) / reference[step])
            for name in ("other-size", "back")
            for step, loss in self.losses[name].items()
        ]
        self.told.table(("step", "stretch", "loss", "in the first job", "relative difference"), list(rows))
        self.facts["losses compared"] = rows
        worst, once = max(row[-1] for row in rows), rows[0][-1]
        first, all_of_them = self.plan.first_loss_tolerance, self.plan.loss_tolerance
        self.told.expect(once <= first, f"the first step after the checkpoint has the same loss, to {first:g}", once)
        self.told.expect(worst <= all_of_them, f"all steps have the same losses, to {all_of_them:g}", worst)
        start, last = self.losses["first"][1], max(reference.items())[1]
        self.told.expect(last < 0.9 * start, "the loss went on from where it was", f"{start:.3f} -> {last:.3f}")

    def scrape(self) -> Scrape:
        """Look at the service's /metrics."""
        return scrape(self.service.url)


def _grown(before: Scrape, after: Scrape, name: str, job: str) -> dict[str, int]:
    earlier = before.by(name, "kernel", job=job)
    return {key[0]: int(value - earlier.get(key, 0)) for key, value in after.by(name, "kernel", job=job).items()}


def _matrices(earlier: r.StepPoint, later: r.StepPoint) -> dict[str, int]:
    """Return the matrices that each kernel orthogonalised between two steps, all ranks together; kernels with none
    are left out."""
    counts: dict[str, int] = {}
    for point, sign in ((later, 1), (earlier, -1)):
        for entry in point.ns:
            counts[entry.kernel] = counts.get(entry.kernel, 0) + sign * entry.matrices
    return {kernel: number for kernel, number in counts.items() if number}


def _plan(options: argparse.Namespace, idle: Gpus | None) -> Plan:
    if options.share:
        return decide_plan(2, cpu=False, share=True)
    have = 2 if idle is None else len(idle.used_bytes)
    workers = options.gpus or min(2, have)
    if workers > have:
        raise Violated(f"expected: --gpus at most {have}, which the machine has; found: {workers}")
    return decide_plan(workers, cpu=idle is None)


def _tell(options: argparse.Namespace, told: Transcript, state_dir: Path) -> Story:
    idle = None if options.cpu else gpus_now()
    plan = _plan(options, idle)
    if idle is not None:
        used = ", ".join(f"GPU {index}: {number >> 20} MiB" for index, number in idle.used_bytes.items())
        told.say(f"before: {used}; {len(idle.processes)} processes")
    service = OwnService(state_dir, num_cpus=2 if options.cpu else None, extra={"DMUON_GPU_LOOK_S": "3"})
    with running(service, told) as client:
        story = Story(plan, service, client, told, idle)
        story.run()
    expect_free(told, idle)
    return story


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_end_to_end")
    parser.add_argument("--gpus", type=int, choices=(1, 2), help="workers; default: the GPUs of the machine, at most 2")
    parser.add_argument("--cpu", action="store_true", help="gloo, a tiny model, kernels that run everywhere")
    parser.add_argument(
        "--share", action="store_true", help="two workers share a GPU: for what it shows, not for speed"
    )
    parser.add_argument("--limit-s", type=float, default=270.0)
    options = parser.parse_args(arguments)
    if options.share and (options.cpu or options.gpus is not None):
        other = "--cpu, where there is no GPU to share" if options.cpu else f"--gpus {options.gpus}"
        parser.error(f"--share is two workers on one GPU and goes without {other}: leave one of them out")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run it; 0 when every expectation held."""
    options = _parse(arguments)
    ended = tell_story(options.limit_s, lambda told, state_dir: _tell(options, told, state_dir))
    if ended is None:
        return 1
    story, told = ended
    workers = story.plan.sizes[0]
    name = f"gpu_end_to_end-{workers}" + ("-shared" if options.share else "")
    write_result(name, story.rows, sizes=story.plan.sizes, **story.facts, transcript=told.lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
