"""The step benchmark on every mesh of a world: 1-D, replicas of shards, replicated storage; ours beside AdamW on each.

    python -m torch.distributed.run --nproc-per-node 8 -m benchmarks.scaling [--workload llama] [--rounds 30]
        [--layouts 1x8,2x4,replicated] [--only "ours pure Z3,fsdp2 + adamw Z3"]
    python -m benchmarks.scaling --plot docs/images/scaling-measured.png [--workload llama] [--chip nvidia-h200]

One command a number of GPUs; each writes one JSON. Contestants of a layout and Z mode take turns, and leave before the
next ones come: three models are in memory at once. Times are medians over rounds, of the slowest rank. Overhead is over
FSDP2 with AdamW (DDP with AdamW for replicated storage) on the same mesh and with the same Z mode. Beside what is
measured stands what the plan says of it: bytes, matrices, the busiest owner over the mean. The picture adds what the
cost model predicts.

Batches grow with the world. That worlds of different sizes train the same is shown apart: every layout also does some
steps on eight sequences that stay the same, and its losses must be those of every other layout and size.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon_runtime as dmuon
from benchmarks._scaling_plot import compare_losses, plot, results_of
from benchmarks.common import join_group, print_table, write_result
from benchmarks.contestants import BUILDERS
from benchmarks.replicated import REPLICATED
from benchmarks.step import Runner
from benchmarks.workloads import WORKLOADS, Workload
from dmuon_runtime import ledger

__all__ = ["Layout", "SameBatch", "layouts_of", "main", "measure", "same_batch_losses"]

SHARDED = ("fsdp2 + adamw", "ours pure", "ours hybrid")
SAME_SEQUENCES = 8
SAME_STEPS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, replicate by shard, and whether every rank keeps the whole model."""

    replicate: int
    shard: int
    replicated: bool = False

    @property
    def name(self) -> str:
        """As ``--layouts`` says it."""
        return "replicated" if self.replicated else f"{self.replicate}x{self.shard}"

    def turns(self, only: Sequence[str] | None = None) -> list[list[str]]:
        """Return the contestants that are in memory at once and take turns: those of one Z mode, AdamW first."""
        every = [list(REPLICATED)] if self.replicated else [[f"{n} {mode}" for n in SHARDED] for mode in ("Z3", "Z2")]
        chosen = [[name for name in names if only is None or name in only] for names in every]
        return [names for names in chosen if names]


def layouts_of(world_size: int, asked: str | None = None) -> list[Layout]:
    """Return the layouts of a world: 1-D, two replicas of half the ranks from four on, replicated from two on.

    Raises:
        ValueError: an asked one that is no mesh of this many ranks.
    """
    found = [Layout(1, world_size)]
    found += [Layout(2, world_size // 2)] if world_size >= 4 and world_size % 2 == 0 else []
    found += [Layout(1, world_size, replicated=True)] if world_size > 1 else []
    if asked is None:
        return found
    chosen = []
    for word in asked.split(","):
        replicate, _, shard = word.partition("x")
        if word == "replicated":
            chosen.append(Layout(1, world_size, replicated=True))
        elif replicate.isdigit() and shard.isdigit() and int(replicate) * int(shard) == world_size:
            chosen.append(Layout(int(replicate), int(shard)))
        else:
            raise ValueError(f"layout {word!r} is neither 'replicated' nor RxS with R * S = {world_size} ranks")
    return chosen


@dataclass(frozen=True, slots=True)
class SameBatch(Workload):
    """A workload whose batch is the same sequences in every step and for every number of ranks, which share them."""

    world_size: int = 1

    def tokens(self, step: int, rank: int, device: torch.device) -> Tensor:
        """Return this rank's sequences, int64 [batch / world size, sequence]."""
        return Workload.tokens(self, 0, 0, device)[rank :: self.world_size]


def _grid(layout: Layout, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))


def _build(name: str, layout: Layout, workload: Workload, device: torch.device) -> Runner:
    grid, dtype = _grid(layout, device), torch.bfloat16 if device.type == "cuda" else torch.float32
    before, model = _allocated(device), workload.build(device)
    if layout.replicated:
        contestant = REPLICATED[name](model, grid, dtype)
    else:
        contestant = BUILDERS[name[:-3]](model, grid, name.endswith("Z3"), dtype)
    return Runner(name, contestant, workload, device, _allocated(device) - before)


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated()


def same_batch_losses(layout: Layout, workload: Workload, device: torch.device) -> list[float]:
    """Return the losses of the first steps of the fixed batch, trained by ours. Collective.

    Raises:
        ValueError: the ranks cannot share the batch evenly.
    """
    world_size = dist.get_world_size()
    if SAME_SEQUENCES % world_size:
        raise ValueError(f"{world_size} ranks cannot share {SAME_SEQUENCES} sequences evenly")
    same = SameBatch(**(asdict(workload) | {"batch": SAME_SEQUENCES}), world_size=world_size)
    runner = _build("ours replicated" if layout.replicated else "ours pure Z3", layout, same, device)
    losses = []
    for _ in range(SAME_STEPS):
        loss = runner.step()
        dist.all_reduce(loss)
        losses.append(float(loss) / world_size)
    return losses


@dataclass(slots=True)
class _Counted:
    """What one rank counted of a contestant over the timed rounds."""

    comm: dict[str, tuple[float, float, int]]
    """Seconds, exposed seconds and payload bytes by route and phase."""
    owner_s: float
    matrices: int
    ns_s: float


def measure(
    layout: Layout, names: Sequence[str], workload: Workload, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Build contestants of a layout, warm up, time in turns; return a row for each. Collective."""
    runners = [_build(name, layout, workload, device) for name in names]
    for runner in runners:
        before = _allocated(device)
        runner.warm_up()
        runner.resident_bytes += _allocated(device) - before
    counted = _timed(runners, rounds, device)
    everyone: list[list[_Counted | None]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, counted)
    step_ms = {runner.name: statistics.median(runner.step_ms) for runner in runners}
    rows = []
    for index, runner in enumerate(runners):
        baseline = "ddp + adamw" if layout.replicated else f"fsdp2 + adamw {runner.name[-2:]}"
        row: dict[str, Any] = {
            "layout": layout.name, "mesh": (layout.replicate, layout.shard), "contestant": runner.name,
            "step ms": step_ms[runner.name],
            "overhead %": (step_ms[runner.name] / step_ms[baseline] - 1) * 100 if baseline in step_ms else None,
            "update ms": statistics.median(runner.update_ms), "peak GiB": _gib(runner.peak_bytes, device),
            "resident GiB": _gib(runner.resident_bytes, device), "first losses": runner.losses,
        }  # fmt: skip
        ranks = [entry for rank in everyone if (entry := rank[index]) is not None]
        rows.append(row | (_counted_row(dmuon.get_plan(runner.contestant.model), ranks, rounds) if ranks else {}))
    return rows


def _gib(size: int, device: torch.device) -> float | None:
    """Return GiB; None on a CPU, where nobody counts what is allocated."""
    return size / 2**30 if device.type == "cuda" else None


def _timed(runners: Sequence[Runner], rounds: int, device: torch.device) -> list[_Counted | None]:
    """Time in turns; return what this rank counted of each."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # what warming up began is counted before
    before = [_snapshot(runner) for runner in runners]
    ns = [0.0] * len(runners)
    for number in range(rounds):
        for turn in range(len(runners)):
            index = (number + turn) % len(runners)
            at = _ns_seconds()
            runners[index].timed(_allocated(device) - runners[index].resident_bytes)
            ns[index] += _ns_seconds() - at
    return [_difference(b, _snapshot(r), s) for b, r, s in zip(before, runners, ns, strict=True)]


def _ns_seconds() -> float:
    return sum(count.seconds for count in ledger.snapshot().values())


def _snapshot(runner: Runner) -> dmuon.CountersSnapshot | None:
    return dmuon.get_counters(runner.contestant.model).snapshot() if runner.contestant.counted else None


def _difference(
    before: dmuon.CountersSnapshot | None, after: dmuon.CountersSnapshot | None, ns_s: float
) -> _Counted | None:
    if before is None or after is None:
        return None
    comm = {}
    for key, total in after.comm.items():
        earlier = before.comm.get(key, dmuon.CommCount())
        comm["/".join(key)] = (
            total.seconds - earlier.seconds,
            total.exposed_seconds - earlier.exposed_seconds,
            total.payload_bytes - earlier.payload_bytes,
        )
    owner_s = after.owner_compute_seconds - before.owner_compute_seconds
    return _Counted(comm, owner_s, after.ns_planned_matrices - before.ns_planned_matrices, ns_s)


def _counted_row(plan: dmuon.RuntimePlan, ranks: Sequence[_Counted], rounds: int) -> dict[str, Any]:
    """Return what all ranks counted in a step, beside the plan."""
    owner_s = [rank.owner_s / rounds for rank in ranks]
    planned_bytes: dict[str, int] = {}
    for table in plan.rank_traffic:
        for key, item in table.items():
            planned_bytes["/".join(key)] = planned_bytes.get("/".join(key), 0) + item.payload_bytes
    return {
        "communication": {
            key: {
                "ms": statistics.mean(rank.comm[key][0] for rank in ranks if key in rank.comm) * 1e3 / rounds,
                "exposed ms": max(rank.comm[key][1] for rank in ranks if key in rank.comm) * 1e3 / rounds,
                "bytes": sum(rank.comm[key][2] for rank in ranks if key in rank.comm) // rounds,
                "planned bytes": planned_bytes.get(key, 0),
            }
            for key in dict.fromkeys(key for rank in ranks for key in rank.comm)
        },
        "owner balance planned": plan.predicted_imbalance,
        "owner balance measured": max(owner_s) / statistics.mean(owner_s),
        "owner ms": [seconds * 1e3 for seconds in owner_s],
        "planned cost": [rank.cost for rank in plan.ranks],
        "matrices": [rank.matrices // rounds for rank in ranks],
        "planned matrices": [rank.matrices for rank in plan.ranks],
        "newton-schulz ms": max(rank.ns_s for rank in ranks) * 1e3 / rounds,
        "planned resident GiB": max(rank.resident_bytes for rank in plan.ranks) / 2**30,
    }


def run(
    workload: Workload, layouts: Sequence[Layout], device: torch.device, rounds: int, only: Sequence[str] | None
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Measure every layout; return the rows, and the losses of the fixed batch by layout. Collective."""
    rows: list[dict[str, Any]] = []
    losses: dict[str, list[float]] = {}
    gc.collect()
    gc.freeze()  # what was imported stays: collections between contestants then take no half second each
    for layout in layouts:
        losses[layout.name] = same_batch_losses(layout, workload, device)
        _let_go(device)
        for names in layout.turns(only):
            rows += measure(layout, names, workload, device, rounds)
            _let_go(device)
    return rows, losses


def _let_go(device: torch.device) -> None:
    """Collect models that nobody holds any more, so that their memory and groups serve the next layout."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()


def _report(rows: Sequence[dict[str, Any]], losses: dict[str, list[float]], name: str, world_size: int) -> None:
    shown = (
        "layout", "contestant", "step ms", "overhead %", "update ms", "newton-schulz ms", "owner balance planned",
        "owner balance measured", "peak GiB", "resident GiB",
    )  # fmt: skip
    print_table(shown, [["-" if row.get(key) is None else row[key] for key in shown] for row in rows])
    for row in rows:
        for key, entry in row.get("communication", {}).items():
            print(f"{row['layout']} {row['contestant']} {key}: {entry}")
    print(f"losses of the fixed batch: {losses}")
    facts = {"unit": "milliseconds, median", "workload": name, "world_size": world_size}
    write_result(f"scaling-{name}-{world_size}", rows, **facts, same_batch_losses=losses)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.scaling")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="llama" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layouts", help="comma-separated: RxS and 'replicated'; default: those of the world")
    parser.add_argument("--only", help="comma-separated contestants")
    parser.add_argument("--plot", type=Path, help="draw the results that are there, and measure nothing")
    parser.add_argument("--chip", help="of which the plot has predictions; default: the one that was measured")
    return parser.parse_args(arguments)


def _names(only: str | None) -> Iterator[str]:
    layouts = (Layout(1, 1), Layout(1, 1, replicated=True))
    known = {name for layout in layouts for names in layout.turns() for name in names}
    for name in [] if only is None else only.split(","):
        if name.strip() not in known:
            raise SystemExit(f"--only names {name.strip()!r}; there are {', '.join(sorted(known))}")
        yield name.strip()


def main(arguments: Sequence[str]) -> int:
    """Run on every rank of the process group that torchrun made; rank 0 prints and writes."""
    options = _parse(arguments)
    only = list(_names(options.only)) or None
    if options.plot is not None:
        results = results_of(options.workload)
        plot(results, options.plot, options.chip)
        return compare_losses(results)
    device = join_group()
    try:
        layouts = layouts_of(dist.get_world_size(), options.layouts)
        rows, losses = run(WORKLOADS[options.workload], layouts, device, options.rounds, only)
        if dist.get_rank() == 0:
            _report(rows, losses, options.workload, dist.get_world_size())
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
