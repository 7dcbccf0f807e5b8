"""Does the runtime's own overlap agree with a profiler trace of the same steps? On NVIDIA GPUs.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.trace_overlap [--workload llama] [--steps 5]
        [--mode "ours pure Z3"] [--replicate 1] [--batch 8] [--vocabulary 8192] [--trace FOLDER]

The runtime reads events beside the streams, all the time; the trace sees every kernel, of these steps only. Both are
shown by route and phase with their difference; an agreement within 5 points of overlap is what the design asks for.
Compared is the time for which compute stood still, waiting. The time without any compute kernel, whatever the reason,
is shown beside it: where the host is fast enough and the GPU serves one rank alone it is the same. Routes and phases
with less than 1 % of the communication are shown, and not judged: a hundred collectives of 5 us are all latency.

Two ranks on one GPU take turns on it, and a collective that waits for its turn counts from its issue, in the trace from
its kernel: ``nvidia-cuda-mps-control -d`` before, and ``echo quit | nvidia-cuda-mps-control`` behind, lets both run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import dmuon_runtime as dmuon
from benchmarks._tracing import annotated
from benchmarks.common import join_group, open_grid, print_table, write_result
from benchmarks.contestants import BUILDERS, Contestant
from benchmarks.traces import TracedComm, read_overlap
from benchmarks.workloads import WORKLOADS, Workload
from dmuon_runtime.runtime import find_runtime

__all__ = ["apart", "compare", "main"]

WARMUP = 5
TOLERANCE = 0.05
MIN_SHARE = 0.01
"""Of all communication: below it a route and phase is shown, and not judged."""


def compare(
    traced: dict[str, TracedComm], before: dmuon.CountersSnapshot, after: dmuon.CountersSnapshot
) -> list[dict[str, Any]]:
    """Return a row for each route and phase: overlap counted, overlap traced, and the difference in points."""
    rows = []
    for key, total in sorted(after.comm.items()):
        earlier = before.comm.get(key, dmuon.CommCount())
        seconds, exposed = total.seconds - earlier.seconds, total.exposed_seconds - earlier.exposed_seconds
        seen = traced.get("/".join(key))
        counted = 1 - exposed / seconds if seconds > 0 else None
        found = None if seen is None else seen.unstalled_ratio
        rows.append(
            {
                "route": "/".join(key),
                "counted ms": seconds * 1e3,
                "traced ms": None if seen is None else seen.seconds * 1e3,
                "counted exposed ms": exposed * 1e3,
                "traced stall ms": None if seen is None else seen.stalled_seconds * 1e3,
                "without compute ms": None if seen is None else seen.exposed_seconds * 1e3,
                "counted overlap": counted,
                "traced overlap": found,
                "difference": None if counted is None or found is None else counted - found,
            }
        )
    return rows


def apart(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the routes and phases, of those long enough to be judged, whose overlaps differ by more than 5 points."""
    least = MIN_SHARE * sum(row["counted ms"] for row in rows)
    judged = [row for row in rows if row["counted ms"] >= least]
    return [row["route"] for row in judged if row["difference"] is None or abs(row["difference"]) > TOLERANCE]


def _step(contestant: Contestant, workload: Workload, number: int, device: torch.device) -> None:
    contestant.forward_backward(workload.tokens(number, dist.get_rank(), device))
    contestant.update()


def measure(contestant: Contestant, workload: Workload, device: torch.device, steps: int, path: Path) -> list[Any]:
    """Train, trace ``steps`` steps, and compare on this rank."""
    runtime = find_runtime(contestant.model)
    for number in range(WARMUP):
        _step(contestant, workload, number, device)
    torch.cuda.synchronize()
    dist.barrier()
    before = runtime.counters.snapshot()
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with annotated(runtime.transport), profile(activities=both) as taken:
        for number in range(steps):
            _step(contestant, workload, WARMUP + number, device)
        torch.cuda.synchronize()
    after = runtime.counters.snapshot()
    assert before.pending_spans == after.pending_spans == 0, "the device is idle: every span has ended"
    taken.export_chrome_trace(str(path))
    return compare(read_overlap(json.loads(path.read_text())), before, after)


def main(argv: Sequence[str] | None = None) -> None:
    """Run as one rank of a group that torch's launcher made."""
    parser = argparse.ArgumentParser(prog="benchmarks.trace_overlap")
    parser.add_argument("--workload", choices=WORKLOADS, default="llama")
    parser.add_argument("--mode", choices=[f"{n} {z}" for n in ("ours pure", "ours hybrid") for z in ("Z3", "Z2")],
                        default="ours pure Z3")  # fmt: skip
    parser.add_argument("--replicate", type=int, default=1, help="replicas; the other ranks are shards")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, help="sequences of a rank, where the workload's are too few for the wires")
    parser.add_argument("--vocabulary", type=int, help="where logits of many sequences would not fit")
    parser.add_argument("--trace", type=Path, help="keep the traces in this folder")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("trace_overlap compares kernels on a GPU, and there is none here")
    device = join_group()
    rank = dist.get_rank()
    if dist.get_world_size() == 1:
        raise SystemExit("trace_overlap compares communication, and one rank has none: start two or more")
    grid = open_grid(device, arguments.replicate)
    workload, mode = WORKLOADS[arguments.workload], arguments.mode
    changes = {"batch": arguments.batch, "vocabulary": arguments.vocabulary}
    workload = replace(workload, **{name: value for name, value in changes.items() if value is not None})
    facts = {"workload": arguments.workload, "batch": workload.batch, "vocabulary": workload.vocabulary, "mode": mode}
    facts["mesh"] = tuple(grid.shape)
    contestant = BUILDERS[mode[:-3]](workload.build(device), grid, mode.endswith("Z3"), torch.bfloat16)
    folder = arguments.trace or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    rows = measure(contestant, workload, device, arguments.steps, folder / f"rank{rank}.json")
    if rank == 0:
        print_table(list(rows[0]), [list(row.values()) for row in rows])
        print(f"apart by more than {TOLERANCE:.0%}: {', '.join(apart(rows)) or 'none'}")
        write_result("trace_overlap", rows, world_size=dist.get_world_size(), **facts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
