"""Does the same training give the same losses twice? Where not: is it the device's order of sums, or other kernels?

    python -m torch.distributed.run --nproc-per-node 1 -m benchmarks.repeatability [--workload llama-small] [--steps 40]

One process trains the same weights on the same tokens several times: twice as a job does, twice with torch's
deterministic algorithms, and once more so with another form of Newton-Schulz. Losses of each pair are compared step
by step, to the last bit. What this shows bounds what two attempts of one job can have in common.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import dmuon_runtime as dmuon
from benchmarks.common import expect_positive, join_group, open_grid, print_table, write_result
from benchmarks.contestants import BUILDERS
from benchmarks.workloads import WORKLOADS, Workload

__all__ = ["compare", "main"]

LOOK_AT = (1, 2, 4, 8, 12, 16, 24, 32, 40)
"""Steps of which the relative difference is told."""
PAIRS = (
    ("as a job does", "as a job does, again"),
    ("deterministic", "deterministic, again"),
    ("deterministic", "deterministic, another form"),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of the same training."""

    one: str
    other: str
    first_difference: int | None
    """The first step whose loss differs by a bit; None where all are equal."""
    relative: dict[int, float]
    """Relative difference of the losses by step."""


def compare(one: str, other: str, losses: dict[str, list[float]]) -> Pair:
    """Compare the losses of two runs of as many steps."""
    pairs = list(zip(losses[one], losses[other], strict=True))
    differing = (step for step, (a, b) in enumerate(pairs, 1) if a != b)
    relative = {step: abs(pairs[step - 1][0] / pairs[step - 1][1] - 1) for step in LOOK_AT if step <= len(pairs)}
    return Pair(one, other, next(differing, None), relative)


@contextlib.contextmanager
def _deterministic(asked: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(asked)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def train(name: str, workload: Workload, grid: DeviceMesh, device: torch.device, steps: int) -> list[float]:
    """Return the loss of each step of a run from its first weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with _deterministic(name.startswith("deterministic")):
        contestant = BUILDERS["ours pure"](workload.build(device), grid, True, dtype)
        optimizer = contestant.optimizers[0]
        assert isinstance(optimizer, dmuon.Muon)
        if name.endswith("another form"):
            optimizer.set_newton_schulz(dmuon.NewtonSchulz("direct"))
        losses = []
        for step in range(steps):
            losses.append(float(contestant.forward_backward(workload.tokens(step, dist.get_rank(), device))))
            contestant.update()
    return losses


def main(arguments: Sequence[str]) -> int:
    """Run on every rank of a group that torch's launcher made; return 1 where deterministic runs differ."""
    parser = argparse.ArgumentParser(prog="benchmarks.repeatability")
    parser.add_argument("--workload", choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    expect_positive(parser, options, "steps")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    device = join_group()
    name = options.workload or ("llama-small" if device.type == "cuda" else "tiny")
    try:
        grid = open_grid(device, 1)
        runs = dict.fromkeys(run for pair in PAIRS for run in pair)
        losses = {run: train(run, WORKLOADS[name], grid, device, options.steps) for run in runs}
        pairs = [compare(one, other, losses) for one, other in PAIRS]
        if dist.get_rank() == 0:
            _show(pairs, name)
        return int(pairs[1].first_difference is not None)
    finally:
        dist.destroy_process_group()


def _show(pairs: Sequence[Pair], workload: str) -> None:
    steps = list(pairs[0].relative)
    rows: list[list[object]] = [
        [pair.one, pair.other, pair.first_difference or "-", *(f"{pair.relative[step]:.1e}" for step in steps)]
        for pair in pairs
    ]
    print_table(["one", "other", "first difference", *(f"step {step}" for step in steps)], rows)
    write_result(f"repeatability-{workload}", [asdict(pair) for pair in pairs], world_size=dist.get_world_size())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
