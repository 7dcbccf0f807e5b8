"""Contestants that take turns, and what is measured of them: times of the slowest rank, memory of the fullest.

A turn is a step to get going and then the timed steps, without a look at the device between them: what one step leaves
running, such as publishing to replicas behind the next forward, is then paid for within the next timed one, and the
host is ahead of the device as in training. All ranks begin a turn together, else what keeps one of them back (a
collection of garbage, a batch) would be counted as communication of the others.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import dmuon_runtime as dmuon
from benchmarks._counting import Counted, counted_row, ns_seconds
from benchmarks._exposed import Exposed
from benchmarks._tracing import trace_steps
from benchmarks.contestants import Contestant
from benchmarks.workloads import Workload

__all__ = ["WARMUP", "Runner", "allocated", "groups_of", "let_go", "measure", "num_at_once"]

WARMUP = 4
"""Steps before the first turn: compilers, allocator and graphs settle."""
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
BYTES_HELD = 13.2
"""Of an element between steps: float32 weight, two states, a tenth more (3B on an H200: AdamW 12.0, ours 12.8)."""
SHARE_HELD = 0.7
"""Of the device's memory that may be held between steps; a step needs the rest."""


@dataclass(slots=True)
class Runner:
    """One contestant and what was measured of it on this rank; times are those of the slowest."""

    name: str
    contestant: Contestant
    workload: Workload
    device: torch.device
    resident_bytes: int = 0
    """Allocated by building it and left by its steps."""
    peak_bytes: int = 0
    """Of its steps, less what other contestants hold."""
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    ns_s: float = 0.0
    launches: int | None = None
    exposed: Exposed | None = None
    """Of the most exposed rank, where steps were traced."""
    torch_ns_ms: float | None = None
    """Of torch's Newton-Schulz in a traced step; None where it did not run."""
    _steps: int = 0

    def step(self) -> Tensor:
        """Do one step; return the loss of this rank."""
        loss = self.contestant.forward_backward(self._batch())
        self.contestant.update()
        return loss

    def _batch(self) -> Tensor:
        self._steps += 1
        return self.workload.tokens(self._steps - 1, dist.get_rank(), self.device)

    def warm_up(self) -> None:
        """Do the first steps and keep their mean losses."""
        before = allocated(self.device)
        for _ in range(WARMUP):
            loss = self.step()
            dist.all_reduce(loss)
            self.losses.append(float(loss) / dist.get_world_size())
        self.resident_bytes += allocated(self.device) - before

    def take_turn(self, steps: int) -> None:
        """Do a step to get going and ``steps`` timed ones; keep their times and the peak of memory. Collective."""
        before, cuda = allocated(self.device), self.device.type == "cuda"
        batches = [self._batch() for _ in range(steps + 1)]
        others, at = before - self.resident_bytes, ns_seconds()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        marks = []
        for tokens in batches:
            self.contestant.forward_backward(tokens)
            marks.append(_mark(self.device))
            self.contestant.update()
            marks.append(_mark(self.device))
        self._keep_times(_resolve(marks))
        self.ns_s += ns_seconds() - at
        if cuda:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - others)
        del batches, tokens
        self.resident_bytes += allocated(self.device) - before

    def _keep_times(self, marks: Sequence[float]) -> None:
        """Keep the times between ``marks``, two a step, of all steps but the first."""
        ends = marks[1::2]
        step = [end - begin for begin, end in pairwise(ends)]
        update = [end - begin for begin, end in zip(marks[2::2], marks[3::2], strict=True)]
        slowest = torch.tensor([step, update], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.step_ms += slowest[0].tolist()
        self.update_ms += slowest[1].tolist()

    def count_launches(self, folder: Path | None) -> None:
        """Count what the host launches in one step; keep the trace where a folder is given. Collective."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            self.step()
            torch.cuda.synchronize()
        self.launches = sum(event.count for event in trace.key_averages() if event.key in LAUNCHES)
        if folder is not None and dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            file_name = re.sub(r"\W+", "_", self.name)
            trace.export_chrome_trace(str(folder / f"{file_name}.json.gz"))

    def trace(self, steps: int) -> None:
        """Trace ``steps`` steps, and keep for how long compute stood still in one. Collective, on CUDA alone."""
        self.exposed, self.torch_ns_ms = trace_steps(self.contestant, self.step, steps)

    def snapshot(self) -> dmuon.CountersSnapshot | None:
        """Return the runtime's totals; None where it is not at work."""
        return dmuon.get_counters(self.contestant.model).snapshot() if self.contestant.counted else None


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter() * 1e3
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _resolve(marks: Sequence[Any]) -> list[float]:
    """Return milliseconds since the first mark, when the device has done everything."""
    if isinstance(marks[0], float):
        return [mark - marks[0] for mark in marks]
    torch.cuda.synchronize()
    return [float(marks[0].elapsed_time(mark)) for mark in marks]


def allocated(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU; 0 on a CPU, where nobody counts them."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return int(torch.cuda.memory_allocated())


def let_go(device: torch.device) -> None:
    """Collect models that nobody holds any more, so that their memory and groups serve the next ones. Collective."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()


def num_at_once(workload: Workload, parts: int, device: torch.device) -> int | None:
    """Return how many contestants fit beside each other, two at least, when each is cut in ``parts``; None: any."""
    if device.type != "cuda":
        return None
    whole = torch.cuda.get_device_properties(device).total_memory
    return max(2, int(SHARE_HELD * whole * parts / (BYTES_HELD * workload.num_elements())))


def groups_of(names: Sequence[str], at_once: int | None) -> list[list[str]]:
    """Return who is in memory at once; the first, to whom the others are compared, is in every group."""
    if at_once is None or len(names) <= at_once:
        return [list(names)] if names else []
    rest = list(names[1:])
    return [[names[0], *rest[begin : begin + at_once - 1]] for begin in range(0, len(rest), at_once - 1)]


def measure(
    names: Sequence[str], build: Callable[[str], Contestant], workload: Workload, device: torch.device, *,
    rounds: int, steps: int, each: Callable[[Runner], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Build contestants, warm them up, let them take turns in rotating order; return a row for each. Collective.

    ``each`` is called with every one of them at the end. Rows have what was counted under ``counted``.
    """
    runners = []
    for name in names:
        before = allocated(device)
        contestant = build(name)
        runners.append(Runner(name, contestant, workload, device, allocated(device) - before))
    for runner in runners:
        runner.warm_up()
    if device.type == "cuda":
        torch.cuda.synchronize()  # what warming up began is counted before
    earlier = [runner.snapshot() for runner in runners]
    for number in range(rounds):
        for turn in range(len(runners)):
            runners[(number + turn) % len(runners)].take_turn(steps)
    counted = [Counted.between(e, r.snapshot(), r.ns_s) for e, r in zip(earlier, runners, strict=True)]
    everyone: list[list[tuple[Counted | None, int, int]]] = [[] for _ in range(dist.get_world_size())]
    mine = [(c, r.peak_bytes, r.resident_bytes) for c, r in zip(counted, runners, strict=True)]
    dist.all_gather_object(everyone, mine)
    for runner in runners if each is not None else ():
        each(runner)  # type: ignore[misc]
    return [_row(runner, [rank[at] for rank in everyone], rounds, steps) for at, runner in enumerate(runners)]


def _row(runner: Runner, ranks: Sequence[tuple[Counted | None, int, int]], rounds: int, steps: int) -> dict[str, Any]:
    cuda, step_ms = runner.device.type == "cuda", statistics.median(runner.step_ms)
    counted = [entry for entry, _, _ in ranks if entry is not None]
    return {
        "contestant": runner.name,
        "step ms": step_ms,
        "update ms": statistics.median(runner.update_ms),
        "peak GiB": max(peak for _, peak, _ in ranks) / 2**30 if cuda else None,
        "resident GiB": max(resident for _, _, resident in ranks) / 2**30 if cuda else None,
        "host launches": runner.launches,
        "newton-schulz ms": runner.torch_ns_ms,
        "exposed ms": None if runner.exposed is None else asdict(runner.exposed),
        "first losses": [round(loss, 7) for loss in runner.losses],
        "counted": counted_row(dmuon.get_plan(runner.contestant.model), counted, rounds, steps, step_ms)
        if counted
        else {},
    }
