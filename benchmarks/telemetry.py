"""What telemetry costs: the same steps with it and without it, side by side, in one process group.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.telemetry [--workload cpu] [--batch 4]
        [--rounds 200]

*On* is what a worker does in each step: a span for every collective and update, counters, the ledger of kernels, and a
report as the text that its supervisor gets. *Off* has none of it. A round does one step *on* and two *off*, in an order
drawn anew each time, and compares them with each other alone (:mod:`benchmarks.pairs`). *Off again* over *off* is what
the machine makes of equal work; its interval should hold 0. Wall time is the slowest rank's; CPU time is that of all
threads of the processes, which neighbours on the machine disturb less. Not switched off: the norms of updates and
gradients, which a step computes for clipping, skipping and the update's RMS anyway.

In one of 25 steps a worker also samples how orthogonal an update is. Among all steps that would not be seen, so such a
sample is timed by itself, and its share of a step is shown beside.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dmuon_runtime as dmuon
from benchmarks.common import expect_positive, join_group, write_result
from benchmarks.contestants import BUILDERS, Contestant
from benchmarks.pairs import excess
from benchmarks.workloads import WORKLOADS, Workload
from dmuon_runtime import ledger, muon, transport
from dmuon_runtime.counters import Counters
from dmuon_runtime.orthogonality import orthogonality_bound
from worker.optimizers import Driver
from worker.report import Reporter, StepFacts
from worker.settings import WorkerSettings

__all__ = ["main"]

WARMUP = 3
VARIANTS = ("off", "on", "off again")


class NoSpan:
    """Measures nothing."""

    end = _end_s = None

    def __init__(self, *_: object) -> None: ...

    def follow(self, work: Any) -> None:
        """Look at nothing."""

    def wait(self, work: Any) -> None:
        """Only wait."""
        work.wait()

    pass_by = wait

    def hold_up(self) -> None:
        """Count nothing."""

    def finish(self) -> None:
        """End nothing."""


def _nothing(*_: object) -> None:
    """Count nothing; a mock object in its place would cost as much as what it replaces."""


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Take the clocks out of the runtime."""
    with ExitStack() as stack:
        for name in ("HostSpan", "DeviceSpan"):
            stack.enter_context(mock.patch.object(transport, name, NoSpan))
        stack.enter_context(mock.patch.object(muon, "start_span", NoSpan))
        for name in ("add_collective", "add_owner_compute"):
            stack.enter_context(mock.patch.object(Counters, name, _nothing))
        stack.enter_context(ledger.LEDGER.muted())
        yield


class BenchmarkDriver:
    """What a reporter asks of a worker's driver."""

    def __init__(self, contestant: Contestant) -> None:
        self.optimizer = contestant.optimizers[0]
        self._model = contestant.model

    def counters(self) -> dmuon.CountersSnapshot:
        """Return the runtime's totals."""
        return dmuon.get_counters(self._model).snapshot()

    def owner_compute_seconds(self) -> float:
        """Return the seconds of this rank's updates."""
        return dmuon.get_counters(self._model).owner_compute_seconds()

    def settle(self) -> None:
        """Take the step's times while the device works, as a worker does."""
        dmuon.get_counters(self._model).settle()

    def rates(self) -> dict[str, float]:
        """Return the rate of each route."""
        return {"muon": 0.01, "adamw": 3e-4, "sharded_adamw": 3e-4}


class Watch:
    """What a worker does beside each of its steps."""

    def __init__(self, contestant: Contestant, device: torch.device) -> None:
        self._driver = BenchmarkDriver(contestant)
        self._reporter = Reporter(dist.get_rank(), device, cast(Driver, self._driver))
        self._before = ledger.snapshot()

    def begin(self) -> None:
        """Before the forward."""
        self._before = ledger.snapshot()

    def end(self, loss: Tensor, tokens: Tensor, number: int) -> int:
        """Behind the update; return how long the report is."""
        outcome = self._driver.optimizer.last_step
        assert outcome is not None, "a step was done"
        outcome.send()
        self._driver.settle()
        ahead = self._reporter.ahead()
        facts = StepFacts(
            step=number, loss=float(loss), seconds=1.0, tokens=tokens.numel(), kernel="cublas", kernel_epoch=0,
            orthogonality_error=None, ns_before=self._before,
        )  # fmt: skip
        return len(self._reporter.report(facts, ahead).model_dump_json())


def _step(contestant: Contestant, tokens: Tensor, watch: Watch | None, number: int) -> int:
    """Do one step; return how long its report is."""
    if watch is not None:
        watch.begin()
    loss = contestant.forward_backward(tokens)
    contestant.update()
    return 0 if watch is None else watch.end(loss, tokens, number)


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: seconds of the slowest rank by the wall clock, and means over ranks of CPU seconds and switches."""

    wall_s: float
    cpu_s: float
    switches: float
    """Times that a thread of the process gave its core up or lost it."""


def _clocks() -> tuple[float, float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), time.process_time(), used.ru_nvcsw + used.ru_nivcsw


def _sample(device: torch.device, begin: tuple[float, float, float]) -> Sample:
    """Return what was spent since ``begin``."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = [now - then for now, then in zip(_clocks(), begin, strict=True)]
    slowest, total = (torch.tensor(spent, dtype=torch.float64, device=device) for _ in range(2))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    _, cpu_s, switches = (total / dist.get_world_size()).tolist()
    return Sample(float(slowest[0]), cpu_s, switches)


Found = dict[str, list[Sample]]


def measure(contestant: Contestant, workload: Workload, device: torch.device, rounds: int) -> Found:
    """Return each step by variant and round."""
    watch = Watch(contestant, device)
    found: Found = {name: [] for name in VARIANTS}
    order = random.Random(0)  # the same on all ranks
    for number in range(-WARMUP, rounds):
        tokens = workload.tokens(number + WARMUP, dist.get_rank(), device)
        for name in order.sample(VARIANTS, len(VARIANTS)):
            dist.barrier()
            with ExitStack() as stack:
                if name != "on":
                    stack.enter_context(without_telemetry())
                begin = _clocks()
                _step(contestant, tokens, watch if name == "on" else None, number + WARMUP + 1)
                sample = _sample(device, begin)
            if number >= 0:
                found[name].append(sample)
    return found


def own_seconds(contestant: Contestant, workload: Workload, device: torch.device, steps: int) -> float:
    """Return CPU seconds a step inside telemetry's own code on this rank: its calls, less what timing a call takes.

    For CPUs: beside a device such a call may wait for room in the device's queue.
    """
    spent, watch = [0.0], Watch(contestant, device)

    def timed(call: Any) -> Any:
        def wrapper(*arguments: object) -> object:
            begin = time.thread_time()
            try:
                return call(*arguments)
            finally:
                spent[0] += time.thread_time() - begin - empty_s

        return wrapper

    empty_s = 0.0
    nothing = timed(_nothing)
    for _ in range(1000):
        nothing()
    empty_s, spent[0] = spent[0] / 1000, 0.0
    with ExitStack() as stack:
        for name in ("add_collective", "add_owner_compute", "snapshot"):
            stack.enter_context(mock.patch.object(Counters, name, timed(getattr(Counters, name))))
        for kind in (transport.HostSpan, transport.DeviceSpan):
            for name in ("__init__", "follow", "_ended"):
                if hasattr(kind, name):
                    stack.enter_context(mock.patch.object(kind, name, timed(getattr(kind, name))))
        for name in ("count_launch", "add_matrices"):
            stack.enter_context(mock.patch.object(ledger.Ledger, name, timed(getattr(ledger.Ledger, name))))
        for number in range(steps):
            tokens = workload.tokens(number, dist.get_rank(), device)
            watch.begin()
            loss = contestant.forward_backward(tokens)
            contestant.update()
            begin, before = time.thread_time(), spent[0]
            watch.end(loss, tokens, number + 1)
            spent[0] = before + time.thread_time() - begin
    return spent[0] / steps


def sample_seconds(model: torch.nn.Module, device: torch.device, times: int = 7) -> float:
    """Return what one sample of orthogonality takes, of the smallest matrix, as a worker takes it."""
    shape = min((p.shape for p in model.parameters() if p.ndim == 2), key=lambda shape: (min(shape), shape.numel()))
    matrix, spent = torch.nn.init.orthogonal_(torch.empty(shape, device=device)), list[float]()
    for _ in range(times):
        begin = time.perf_counter()
        float(orthogonality_bound(matrix))
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def main(argv: Sequence[str] | None = None) -> None:
    """Run as one rank of a group that torch's launcher made."""
    parser = argparse.ArgumentParser(prog="benchmarks.telemetry")
    parser.add_argument("--workload", choices=WORKLOADS, default=None)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch", type=int, help="sequences of a rank; default: the workload's")
    arguments = parser.parse_args(argv)
    expect_positive(parser, arguments, "rounds", "batch")
    device = join_group()
    cuda = device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    name = arguments.workload or ("llama" if cuda else "cpu")
    workload = WORKLOADS[name].with_batch(arguments.batch)
    grid = init_device_mesh(device.type, (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    dtype = torch.bfloat16 if cuda else torch.float32
    contestant = BUILDERS["ours pure"](workload.build(device), grid, True, dtype)
    found = measure(contestant, workload, device, arguments.rounds)
    own_s = None if cuda else own_seconds(contestant, workload, device, 10)
    sample_s = sample_seconds(contestant.model, device)
    if dist.get_rank() == 0:
        _show(found, own_s, sample_s, name, workload.batch)
    dist.destroy_process_group()


def compare(found: Found) -> list[dict[str, Any]]:
    """Return a row for each clock: what *on* costs over the mean of the two *off*, and *off again* over *off*."""
    rows = []
    for clock in ("wall_s", "cpu_s", "switches"):
        by_name = {name: [float(getattr(sample, clock)) for sample in found[name]] for name in VARIANTS}
        off = [(one + two) / 2 for one, two in zip(by_name["off"], by_name["off again"], strict=True)]
        costs, noise = excess(by_name["on"], off), excess(by_name["off again"], by_name["off"])
        rows.append({"of": clock, "off": statistics.median(off), "costs": asdict(costs), "off again": asdict(noise)})
        print(f"{clock:>8}  off {statistics.median(off):8.4f}  on {costs}  off again {noise}")
    return rows


def _show(found: Found, own_s: float | None, sample_s: float, workload: str, batch: int) -> None:
    rows = compare(found)
    every = WorkerSettings().orthogonality_every_steps
    share = sample_s / every / rows[0]["off"]
    print(f"a sample of orthogonality: {sample_s * 1e3:.2f} ms, in one of {every} steps {share:.3%} of a step")
    facts = {"sample_s": sample_s, "sample_every_steps": every, "sample_share_of_step": share}
    if own_s is not None:
        share = own_s / rows[0]["off"]
        facts |= {"own_us_a_step": own_s * 1e6, "own_share_of_step": share}
        print(f"inside telemetry's own code: {own_s * 1e6:.0f} us a step and rank, {share:.3%} of a step")
    write_result(
        f"telemetry-{workload}-{batch}", rows, world_size=dist.get_world_size(), workload=workload, batch=batch,
        rounds=len(found["off"]), confidence=0.95, **facts,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
