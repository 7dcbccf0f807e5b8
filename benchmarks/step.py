"""A whole training step: FSDP2 with AdamW and with torch's Muon against the runtime, interleaved in one process group.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.step [--workload llama] [--rounds 20]
        [--replicate 1] [--only "ours pure Z3,fsdp2 + adamw Z3"] [--trace FOLDER]

Every contestant trains the same initial weights on the same tokens: bfloat16 compute on CUDA (float32 on a CPU),
float32 masters and reductions. Z3 frees parameters after the forward, Z2 keeps them until the backward is done. The
times are medians over rounds, of the slowest rank in each. Peak memory is that of a step less what other contestants
hold. Losses of the first steps are kept: Z2 and Z3 must agree, and a contestant that trains something else shows.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import dmuon_runtime as dmuon
from benchmarks.common import join_group, print_table, write_result
from benchmarks.contestants import BUILDERS, Contestant
from benchmarks.workloads import WORKLOADS, Workload
from dmuon_runtime import ledger

__all__ = ["main"]

WARMUP = 4
"""Steps before the first timed round: compilers, allocator and graphs settle."""
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


@dataclass(slots=True)
class Runner:
    """One contestant and what was measured of it."""

    name: str
    contestant: Contestant
    workload: Workload
    device: torch.device
    resident_bytes: int = 0
    """Allocated by building it and left by its first steps."""
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    update_ms: list[float] = field(default_factory=list)
    launches: int | None = None
    _steps: int = 0

    def step(self) -> Tensor:
        """Do one step; return the loss of this rank."""
        tokens = self.workload.tokens(self._steps, dist.get_rank(), self.device)
        self._steps += 1
        loss = self.contestant.forward_backward(tokens)
        self.contestant.update()
        return loss

    def warm_up(self) -> None:
        """Do the first steps and keep their mean losses."""
        for _ in range(WARMUP):
            loss = self.step()
            dist.all_reduce(loss)
            self.losses.append(float(loss) / dist.get_world_size())

    def timed(self, others_bytes: int) -> None:
        """Do one step and keep its times and its peak of memory."""
        tokens = self.workload.tokens(self._steps, dist.get_rank(), self.device)
        self._steps += 1
        marks = [_mark(self.device)]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.contestant.forward_backward(tokens)
        marks.append(_mark(self.device))
        self.contestant.update()
        marks.append(_mark(self.device))
        begin, middle, end = _resolve(marks)
        slowest = torch.tensor([end - begin, end - middle], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.step_ms.append(float(slowest[0]))
        self.update_ms.append(float(slowest[1]))
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - others_bytes)

    def count_launches(self, folder: Path | None) -> None:
        """Count what the host launches in one step; keep the trace where a folder is given."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            self.step()
            torch.cuda.synchronize()
        self.launches = sum(event.count for event in trace.key_averages() if event.key in LAUNCHES)
        if folder is not None and dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            file_name = re.sub(r"\W+", "_", self.name)
            trace.export_chrome_trace(str(folder / f"{file_name}.json.gz"))


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter() * 1e3
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _resolve(marks: Sequence[Any]) -> list[float]:
    """Return milliseconds since the first mark."""
    if isinstance(marks[0], float):
        return [mark - marks[0] for mark in marks]
    torch.cuda.synchronize()
    return [float(marks[0].elapsed_time(mark)) for mark in marks]


def _row(runner: Runner, adamw_ms: float | None) -> dict[str, Any]:
    step = statistics.median(runner.step_ms)
    return {
        "contestant": runner.name,
        "step ms": step,
        "over adamw": None if adamw_ms is None else step / adamw_ms,
        "update ms": statistics.median(runner.update_ms),
        "peak GiB": runner.peak_bytes / 2**30,
        "resident GiB": runner.resident_bytes / 2**30,
        "host launches": runner.launches,
        "first losses": [round(loss, 6) for loss in runner.losses],
    }


def _traffic(runner: Runner, before: dmuon.CountersSnapshot, ns_before: float, num_steps: int) -> dict[str, Any]:
    """What the runtime counted over the timed steps, by route and phase, a step and rank."""
    after = dmuon.get_counters(runner.contestant.model).snapshot()
    step_s = sum(runner.step_ms) / 1e3
    found: dict[str, Any] = {}
    exposed_total = 0.0
    for key, total in after.comm.items():
        earlier = before.comm.get(key, dmuon.CommCount())
        seconds, exposed = total.seconds - earlier.seconds, total.exposed_seconds - earlier.exposed_seconds
        exposed_total += exposed if key[1] in ("forward", "backward") else 0.0
        found["/".join(key)] = {
            "ms": seconds * 1e3 / num_steps,
            "exposed ms": exposed * 1e3 / num_steps,
            "overlap": 1 - exposed / seconds if seconds > 0 else None,
            "bytes": (total.payload_bytes - earlier.payload_bytes) // num_steps,
        }
    owner = after.owner_compute_seconds - before.owner_compute_seconds
    return {
        "communication": found,
        "forward and backward exposed, share of the step": exposed_total / step_s,
        "owner compute ms": owner * 1e3 / num_steps,
        "newton-schulz ms": (_ns_seconds() - ns_before) * 1e3 / num_steps,
    }


def _ns_seconds() -> float:
    return sum(count.seconds for count in ledger.snapshot().values())


def run(arguments: argparse.Namespace, grid: DeviceMesh, device: torch.device) -> list[dict[str, Any]]:
    """Build, warm up, time in turns; return a row for each contestant."""
    workload = WORKLOADS[arguments.workload]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    runners = [_build(name, workload, grid, device, dtype) for name in _chosen(arguments.only)]
    for runner in runners:
        before_bytes = _allocated(device)
        runner.warm_up()
        runner.resident_bytes += _allocated(device) - before_bytes
    details: dict[str, Any] = {runner.name: {} for runner in runners}
    before = {r.name: dmuon.get_counters(r.contestant.model).snapshot() for r in runners if r.contestant.counted}
    ns: dict[str, float] = dict.fromkeys(details, 0.0)
    for number in range(arguments.rounds):
        shift = number % len(runners)
        for runner in runners[shift:] + runners[:shift]:
            at = _ns_seconds()
            runner.timed(_allocated(device) - runner.resident_bytes)
            ns[runner.name] += _ns_seconds() - at
    for runner in runners:
        if runner.contestant.counted:
            start = _ns_seconds() - ns[runner.name]
            details[runner.name] = _traffic(runner, before[runner.name], start, arguments.rounds)
        if device.type == "cuda":
            runner.count_launches(arguments.trace)
    adamw = {r.name[-2:]: statistics.median(r.step_ms) for r in runners if r.name.startswith("fsdp2 + adamw")}
    return [_row(r, adamw.get(r.name[-2:])) | {"counted": details[r.name]} for r in runners]


def _chosen(only: str | None) -> list[str]:
    names = [f"{name} {mode}" for name in BUILDERS for mode in ("Z3", "Z2")]
    if only is None:
        return [name for name in names if name != "fsdp2 + torch muon Z2"]
    chosen = [name.strip() for name in only.split(",")]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise SystemExit(f"--only names {', '.join(unknown)}; there are {', '.join(names)}")
    return chosen


def _build(name: str, workload: Workload, grid: DeviceMesh, device: torch.device, dtype: torch.dtype) -> Runner:
    builder, reshard = BUILDERS[name[:-3]], name.endswith("Z3")
    before_bytes = _allocated(device)
    contestant = builder(workload.build(device), grid, reshard, dtype)
    return Runner(name, contestant, workload, device, _allocated(device) - before_bytes)


def _allocated(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.step")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="llama" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("--trace", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run on every rank of the process group that torchrun made; rank 0 prints and writes."""
    options = _parse(arguments)
    device = join_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        shape = (options.replicate, world // options.replicate)
        grid = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        rows = run(options, grid, device)
        if rank == 0:
            _report(rows, options, shape)
    finally:
        dist.destroy_process_group()
    return 0


def _report(rows: Sequence[dict[str, Any]], options: argparse.Namespace, shape: tuple[int, int]) -> None:
    header = [name for name in rows[0] if name not in ("counted", "first losses")]
    print_table(header, [[row[name] for name in header] for row in rows])
    for row in rows:
        print(f"{row['contestant']}: losses {row['first losses']}")
        for key, entry in row["counted"].get("communication", {}).items():
            print(f"  {key}: {entry}")
    write_result(f"step-{options.workload}-{shape[0]}x{shape[1]}", rows, unit="milliseconds, median", mesh=shape)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
