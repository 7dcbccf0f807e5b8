"""The step benchmark on every mesh of a world: 1-D, replicas of shards, replicated storage; ours beside AdamW on each.

    python -m torch.distributed.run --nproc-per-node 8 -m benchmarks.scaling [--workload llama] [--rounds 6] [--steps 5]
        [--batch 8] [--layouts 1x8,2x4,replicated] [--only "ours pure Z3,fsdp2 + adamw Z3"] [--trace-steps 2]
    python -m benchmarks.scaling --plot docs/images/scaling-measured.png [--workload llama] [--chip nvidia-h200]

One command a number of GPUs; each writes one JSON, anew after every group of contestants, so that what breaks later
takes nothing of it. Contestants of a layout and Z mode take turns (:mod:`benchmarks._turns`), as many at once as fit,
and leave before the next ones come. Times are medians over the timed steps, of the slowest rank; memory is that of the
fullest. Overhead is over FSDP2 with AdamW (DDP with AdamW for replicated storage) on the same mesh and with the same Z
mode. For how long compute stood still because of communication is read from traced steps of every contestant, as in
:mod:`benchmarks.step`. Beside what is measured stands what the plan says of it: bytes, matrices, the busiest owner over
the mean; and the targets, met or missed. The picture adds what the cost model predicts.

Batches grow with the world. That worlds of different sizes train the same is shown apart: every layout also does some
steps on eight short sequences that stay the same, and its losses must be those of every other layout and size.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks._scaling_plot import compare_losses, plot, results_of
from benchmarks._turns import Runner, groups_of, let_go, measure, num_at_once
from benchmarks._verdicts import LOSS_TOLERANCE, losses_apart, print_exposed, print_targets, scaling_targets
from benchmarks.common import add_trace_steps, expect_positive, join_group, print_table, write_result
from benchmarks.contestants import BUILDERS, Contestant
from benchmarks.replicated import REPLICATED
from benchmarks.workloads import WORKLOADS, Workload

__all__ = ["Layout", "SameBatch", "layouts_of", "main", "run", "same_batch_losses"]

SHARDED = ("fsdp2 + adamw", "ours pure", "ours hybrid")
SAME_SEQUENCES = 8
SAME_LENGTH = 512
"""At most: one rank alone holds all eight sequences."""
SAME_STEPS = 4
DDP_BYTES = 20
"""Of an element in a step of DDP with AdamW: weight, gradient, two states, and DDP's bucket, all float32."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, replicate by shard, and whether every rank keeps the whole model."""

    replicate: int
    shard: int
    replicated: bool = False

    @property
    def parts(self) -> int:
        """How many ranks share what AdamW keeps."""
        return 1 if self.replicated else self.shard

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


def too_large(layout: Layout, workload: Workload, device: torch.device) -> str | None:
    """Return why a layout cannot be measured on this device; None where it can."""
    if device.type != "cuda" or not layout.replicated:
        return None
    needed, whole = DDP_BYTES * workload.num_elements(), torch.cuda.get_device_properties(device).total_memory
    if needed < 0.85 * whole:
        return None
    return f"DDP with AdamW alone holds {needed / 2**30:.0f} GiB, and the device has {whole / 2**30:.0f}"


def _grid(layout: Layout, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))


def _builder(layout: Layout, grid: DeviceMesh, workload: Workload, device: torch.device) -> Callable[[str], Contestant]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def build(name: str) -> Contestant:
        model = workload.build(device)
        if layout.replicated:
            return REPLICATED[name](model, grid, dtype)
        return BUILDERS[name[:-3]](model, grid, name.endswith("Z3"), dtype)

    return build


def same_batch_losses(layout: Layout, grid: DeviceMesh, workload: Workload, device: torch.device) -> list[float]:
    """Return the losses of the first steps of the fixed batch, trained by ours. Collective.

    Raises:
        ValueError: the ranks cannot share the batch evenly.
    """
    world_size = dist.get_world_size()
    if SAME_SEQUENCES % world_size:
        raise ValueError(f"{world_size} ranks cannot share {SAME_SEQUENCES} sequences evenly")
    fixed = replace(workload, batch=SAME_SEQUENCES, sequence=min(workload.sequence, SAME_LENGTH))
    same = SameBatch(**asdict(fixed), world_size=world_size)
    name = "ours replicated" if layout.replicated else "ours pure Z3"
    runner = Runner(name, _builder(layout, grid, same, device)(name), same, device)
    losses = []
    for _ in range(SAME_STEPS):
        loss = runner.step()
        dist.all_reduce(loss)
        losses.append(float(loss) / world_size)
    return losses


def _rows(layout: Layout, found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a group with their layout, and over whom they are."""
    step_ms = {row["contestant"]: row["step ms"] for row in found}
    for row in found:
        base = step_ms.get("ddp + adamw" if layout.replicated else f"fsdp2 + adamw {row['contestant'][-2:]}")
        place = {"layout": layout.name, "mesh": (layout.replicate, layout.shard)}
        overhead = None if base is None else (row["step ms"] / base - 1) * 100
        yield (
            place
            | {key: value for key, value in row.items() if key != "counted"}
            | {"overhead %": overhead}
            | (row["counted"])
        )


Rows = list[dict[str, Any]]
Losses = dict[str, list[float]]


def run(
    workload: Workload,
    layouts: Sequence[Layout],
    device: torch.device,
    turns: tuple[int, int],
    only: Sequence[str] | None,
    keep: Callable[[Rows, Losses], object] = lambda rows, losses: None,
    trace_steps: int = 0,
) -> tuple[Rows, Losses]:
    """Measure every layout in rounds of ``turns`` = (rounds, timed steps of a turn); ``keep`` what there is so far.

    ``trace_steps`` of each contestant are traced behind its turns, on CUDA.
    Returns the rows, and the losses of the fixed batch by layout. Collective.
    """
    rows: Rows = []
    losses: Losses = {}
    gc.collect()
    gc.freeze()  # what was imported stays: collections between contestants then take no half second each
    each = (lambda runner: runner.trace(trace_steps)) if trace_steps and device.type == "cuda" else None
    for layout in layouts:
        grid = _grid(layout, device)
        losses[layout.name] = same_batch_losses(layout, grid, workload, device)
        let_go(device)
        build, at_once = _builder(layout, grid, workload, device), num_at_once(workload, layout.parts, device)
        for names in layout.turns(only):
            for group in groups_of(names, at_once):
                found = measure(group, build, workload, device, rounds=turns[0], steps=turns[1], each=each)
                rows += _rows(layout, found)
                let_go(device)
                keep(rows, losses)
    return rows, losses


def _keep(rows: Rows, losses: Losses, name: str, batch: int, left_out: dict[str, str]) -> None:
    """Write what was measured; rank 0 alone."""
    world_size = dist.get_world_size()
    if dist.get_rank() == 0:
        targets = [asdict(target) | {"verdict": target.verdict} for target in scaling_targets(name, world_size, rows)]
        facts = {"unit": "milliseconds, median", "workload": name, "batch": batch, "world_size": world_size}
        facts["left_out"] = left_out
        write_result(f"scaling-{name}-{world_size}", rows, **facts, targets=targets, same_batch_losses=losses)


def _report(rows: Rows, losses: Losses, name: str, world_size: int, device: torch.device) -> int:
    """Print everything; return 1 where losses differ that should not."""
    shown = (
        "layout", "contestant", "step ms", "overhead %", "update ms", "newton-schulz ms", "owner balance planned",
        "owner balance measured", "peak GiB", "resident GiB",
    )  # fmt: skip
    print_table(shown, [[row.get(key) for key in shown] for row in rows])
    print_exposed(rows)
    for row in rows:
        for key, entry in row.get("communication", {}).items():
            print(f"{row['layout']} {row['contestant']} {key}: {entry}")
    print(f"losses of the fixed batch: {losses}")
    print_targets(list(scaling_targets(name, world_size, rows)), f"H200s; this was {world_size} ranks on {device.type}")
    apart = losses_apart(rows, LOSS_TOLERANCE[device.type])
    print("\n".join(apart) or f"losses that should be the same are, to {LOSS_TOLERANCE[device.type]:g}")
    return int(bool(apart))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.scaling")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="llama" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn, after one that is not timed")
    parser.add_argument("--batch", type=int, help="sequences of a rank; default: the workload's")
    parser.add_argument("--layouts", help="comma-separated: RxS and 'replicated'; default: those of the world")
    parser.add_argument("--only", help="comma-separated contestants")
    add_trace_steps(parser)
    parser.add_argument("--plot", type=Path, help="draw the results that are there, and measure nothing")
    parser.add_argument("--chip", help="of which the plot has predictions; default: the one that was measured")
    options = parser.parse_args(arguments)
    expect_positive(parser, options, "rounds", "steps", "batch")
    return options


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
        name, workload = options.workload, WORKLOADS[options.workload].with_batch(options.batch)
        asked = layouts_of(dist.get_world_size(), options.layouts)
        left_out = {layout.name: why for layout in asked if (why := too_large(layout, workload, device)) is not None}
        layouts = [layout for layout in asked if layout.name not in left_out]
        rows, losses = run(
            workload, layouts, device, (options.rounds, options.steps), only,
            lambda rows, losses: _keep(rows, losses, name, workload.batch, left_out), options.trace_steps,
        )  # fmt: skip
        if dist.get_rank() == 0:
            for layout_name, why in left_out.items():
                print(f"layout {layout_name} was left out: {why}")
            return _report(rows, losses, name, dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
