"""A whole training step: FSDP2 with AdamW and with torch's Muon against the runtime, interleaved in one process group.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.step [--workload llama] [--rounds 6] [--steps 5]
        [--replicate 1] [--batch 8] [--only "ours pure,fsdp2 + adamw Z3"] [--trace-steps 2] [--trace FOLDER]

Every contestant trains the same initial weights on the same tokens: bfloat16 compute on CUDA (float32 on a CPU),
float32 masters and reductions. Z3 frees parameters after the forward, Z2 keeps them until the backward is done. Those
of one Z mode take turns (:mod:`benchmarks._turns`), as many at once as fit; the public dmuon package is among them
where it is installed. Times are medians over the timed steps, of the slowest rank in each; memory is that of the
fullest rank. What the runtime counts of a hybrid is its own part, without FSDP2's.

On CUDA ``--trace-steps`` steps of each are traced when all turns are over, and show for how long compute stood still
because of communication (:mod:`benchmarks._exposed`): of every contestant alike, the most exposed rank's. Beside it
stands what the runtime counted of its own in the timed turns. 0 turns tracing off; ``--trace`` keeps one more step.

The JSON is written anew after every group, so that what breaks later takes nothing of it.
It ends with exit code 1 where losses differ that should be the same: all begin with the same weights, and one optimizer
trains the same however it is sharded. Targets are printed with what was found; missing one is no failure.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks._turns import Runner, groups_of, let_go, measure, num_at_once
from benchmarks._verdicts import LOSS_TOLERANCE, losses_apart, print_exposed, print_targets, step_targets
from benchmarks.common import add_trace_steps, expect_positive, join_group, open_grid, print_table, write_result
from benchmarks.contestants import BUILDERS, Contestant
from benchmarks.workloads import WORKLOADS

__all__ = ["main"]

BASE = "fsdp2 + adamw"


Rows = list[dict[str, Any]]


def run(
    options: argparse.Namespace,
    grid: DeviceMesh,
    device: torch.device,
    keep: Callable[[Rows], object] = lambda rows: None,
) -> Rows:
    """Measure those of each Z mode in turns, and ``keep`` what there is so far; return all rows. Collective."""
    workload, names = WORKLOADS[options.workload].with_batch(options.batch), _chosen(options.only)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def build(name: str) -> Contestant:
        return BUILDERS[name[:-3]](workload.build(device), grid, name.endswith("Z3"), dtype)

    def look(runner: Runner) -> None:
        if device.type == "cuda":
            runner.count_launches(options.trace)
            if options.trace_steps:
                runner.trace(options.trace_steps)

    rows: Rows = []
    gc.collect()
    gc.freeze()  # what was imported stays: a collection then takes no half second
    at_once = num_at_once(workload, grid.size(1), device)
    for mode in ("Z3", "Z2"):
        for group in groups_of([name for name in names if name.endswith(mode)], at_once):
            found = measure(group, build, workload, device, rounds=options.rounds, steps=options.steps, each=look)
            base = next((row["step ms"] for row in found if row["contestant"].startswith(BASE)), None)
            rows += [row | {"over adamw": None if base is None else row["step ms"] / base} for row in found]
            let_go(device)
            keep(rows)
    return rows


def _chosen(only: str | None) -> list[str]:
    names = [f"{name} {mode}" for name in BUILDERS for mode in ("Z3", "Z2")]
    if only is None:
        return [name for name in names if name != "fsdp2 + torch muon Z2"]
    asked = [name.strip() for name in only.split(",")]
    unknown = [name for name in asked if name not in names and name not in BUILDERS]
    if unknown:
        raise SystemExit(f"--only names {', '.join(unknown)}; there are {', '.join(names)}; without Z2 or Z3: both")
    return [name for name in names if name in asked or name[:-3] in asked]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.step")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="llama" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn, after one that is not timed")
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--batch", type=int, help="sequences of a rank; default: the workload's")
    parser.add_argument("--only", help="comma-separated contestants, each with Z2 or Z3, or for both without")
    add_trace_steps(parser)
    parser.add_argument("--trace", type=Path, help="keep the trace of a step of each in this folder")
    options = parser.parse_args(arguments)
    expect_positive(parser, options, "rounds", "steps", "replicate", "batch")
    _chosen(options.only)
    return options


def main(arguments: Sequence[str]) -> int:
    """Run on every rank of the process group that torchrun made; rank 0 prints and writes."""
    options = _parse(arguments)
    device = join_group()
    try:
        grid = open_grid(device, options.replicate)
        shape, is_first = (grid.size(0), grid.size(1)), dist.get_rank() == 0
        rows = run(options, grid, device, lambda rows: _write(rows, options, shape) if is_first else None)
        return _report(rows, options, shape, device) if is_first else 0
    finally:
        dist.destroy_process_group()


def _write(rows: Rows, options: argparse.Namespace, shape: tuple[int, int]) -> None:
    targets = step_targets(options.workload, rows)
    write_result(
        f"step-{options.workload}-{shape[0]}x{shape[1]}", rows, unit="milliseconds, median", mesh=shape,
        batch=WORKLOADS[options.workload].with_batch(options.batch).batch,
        targets=[asdict(target) | {"verdict": target.verdict} for target in targets],
    )  # fmt: skip


def _report(rows: Rows, options: argparse.Namespace, shape: tuple[int, int], device: torch.device) -> int:
    """Print; return 1 where losses differ that should not."""
    header = ("contestant", "step ms", "over adamw", "update ms", "newton-schulz ms", "peak GiB", "resident GiB",
              "host launches")  # fmt: skip
    print_table(header, [[(row | row["counted"])[name] for name in header] for row in rows])
    print_exposed(rows)
    for row in rows:
        print(f"{row['contestant']}: losses {row['first losses']}")
        for key, entry in row["counted"].get("communication", {}).items():
            print(f"  {key}: {entry}")
    found = list(step_targets(options.workload, rows))
    print_targets(found, f"two H200s; this was {shape[0]} x {shape[1]} on {device.type}")
    apart = losses_apart(rows, LOSS_TOLERANCE[device.type])
    print("\n".join(apart) or f"losses that should be the same are, to {LOSS_TOLERANCE[device.type]:g}")
    return int(bool(apart))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
