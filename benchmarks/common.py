"""What every benchmark shares: interleaved timing, the table, and the JSON result with where it came from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = [
    "RESULTS",
    "add_trace_steps",
    "claim_device",
    "expect_positive",
    "interleaved_ms",
    "join_group",
    "open_grid",
    "print_table",
    "write_result",
]

RESULTS = Path(__file__).parent / "results"


def claim_device(rank: int, world_size: int) -> torch.device:
    """Return this rank's CUDA device and make it the current one; call it before the process group starts.

    Where ranks outnumber devices some share one. NCCL refuses two ranks on one device of one host, so each then calls
    itself a host of its own and they talk through the loopback interface: right for laws and for what is
    counted, not for speed.
    """
    devices = torch.cuda.device_count()
    if world_size > devices:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    device = torch.device("cuda", rank % devices)
    torch.cuda.set_device(device)
    return device


def join_group() -> torch.device:
    """Join the process group that torch's launcher describes, NCCL where there is a GPU; return this rank's device."""
    if "RANK" not in os.environ:
        raise SystemExit(
            "this runs as ranks of a group: python -m torch.distributed.run --nproc-per-node N -m benchmarks.… "
            "(RANK is not set)"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = claim_device(rank, world_size)
    dist.init_process_group("nccl", device_id=device)
    return device


def expect_positive(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End the program with what was expected where one of ``names`` is given and less than 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, not {value}")


def add_trace_steps(parser: argparse.ArgumentParser) -> None:
    """Add ``--trace-steps``, a whole number of at least 0."""
    what = "steps traced of each contestant on CUDA when its turns are over; 0: none"
    parser.add_argument("--trace-steps", type=_at_least_zero, default=2, help=what)


def _at_least_zero(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {value}")
    return value


def open_grid(device: torch.device, replicas: int) -> DeviceMesh:
    """Return the mesh of all ranks, ``replicate`` by ``shard``; ends the program where the ranks are no such grid."""
    world_size = dist.get_world_size()
    if replicas < 1 or world_size % replicas:
        raise SystemExit(f"--replicate must divide the {world_size} ranks, not be {replicas}")
    return init_device_mesh(device.type, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def interleaved_ms(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2, inner: int = 1
) -> dict[str, float]:
    """Median milliseconds of one call of each contestant, taken in turns so that a slow spell hits all of them.

    Args:
        contestants: name to a call that leaves its result on the device.
        rounds: timed rounds; each round times every contestant once, in rotating order.
        warmup: untimed calls of each contestant before the first round.
        inner: calls timed together as one sample.
    """
    for name, call in contestants.items():
        for _ in range(warmup):
            call()
            _wait_for(name)
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_timed_ms(contestants[name], inner))
    return {name: statistics.median(values) for name, values in samples.items()}


def _wait_for(name: str) -> None:
    """Wait for the device, and name the contestant whose kernels faulted, if they did."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}") from error


HEAD_START_CYCLES = 4_000_000
"""About 2 ms of GPU sleep before a sample, so that the host is ahead and the GPU's own time is measured."""


def _timed_ms(call: Callable[[], object], inner: int) -> float:
    if torch.cuda.is_available():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        for _ in range(inner):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / inner
    begin = time.perf_counter()
    for _ in range(inner):
        call()
    return (time.perf_counter() - begin) * 1e3 / inner


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print ``rows`` under ``header``, columns aligned; None is ``-``."""
    text = [[_shown(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in text) for column in range(len(header))]
    for row in text:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _shown(cell: object) -> str:
    return "-" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def write_result(name: str, rows: Sequence[Mapping[str, Any]], *, device: str | None = None, **facts: Any) -> Path:
    """Write ``rows`` with the command, versions, machine and date to ``benchmarks/results/<name>-<device>.json``.

    ``device`` is where the figures come from, if that is not this machine.
    """
    device = device or (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    packages = [
        "torch", "triton", "quack-kernels", "nvidia-cutlass-dsl", "gram-newton-schulz", "transformers", "ray",
        "fastapi", "uvicorn", "sqlalchemy",
    ]  # fmt: skip
    document = {
        "benchmark": name,
        "command": " ".join(["python", "-m", _module(name), *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device,
        "machine": {
            "processor": platform.machine(),
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
        },
        "versions": {package: version for package in packages if (version := _version(package))},
        **facts,
        "rows": list(rows),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{device.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path.relative_to(RESULTS.parent.parent)}")
    return path


def _module(name: str) -> str:
    """Return the module that runs, or the one of that name where Python was started in another way."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None and spec.name.startswith("benchmarks.") else f"benchmarks.{name}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
