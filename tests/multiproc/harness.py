"""Run one function on N ranks of a fresh gloo group, with a hard deadline and the children's own errors."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from benchmarks.common import claim_device

__all__ = ["run_ranks"]

T = TypeVar("T")
_PRELOADED = [
    "torch", "torch.distributed.device_mesh", "torch.utils.checkpoint", "dmuon_runtime", "worker.train",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip
"""A process has one server of forks: what local runs need is there too."""


def _child(
    connection: Connection,
    rank: int,
    world_size: int,
    store: str,
    deadline_s: float,
    backend: str,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            claim_device(rank, world_size)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=deadline_s),
        )
        result: object = function(*args)
        connection.send_bytes(pickle.dumps((True, result)))
        dist.destroy_process_group()
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))


def run_ranks(
    world_size: int, function: Callable[..., T], *args: object, deadline_s: float = 60.0, backend: str = "gloo"
) -> list[T]:
    """Return what ``function(*args)`` returns on each rank; raise AssertionError with every rank's traceback."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ends: list[Connection] = []
        processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(theirs, rank, world_size, store, deadline_s, backend, function, args), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        answers = _collect(ends, time.monotonic() + deadline_s)
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
    assert not failed, "\n".join(failed)
    return [cast(T, value) for _, value in answers]


def _collect(ends: list[Connection], deadline: float) -> list[tuple[bool, object]]:
    answers: list[tuple[bool, object]] = []
    for end in ends:
        try:
            if end.poll(max(0.0, deadline - time.monotonic())):
                answers.append(cast("tuple[bool, object]", pickle.loads(end.recv_bytes())))
            else:
                answers.append((False, "no answer before the deadline: it hangs"))
        except EOFError:
            answers.append((False, "died without an answer"))
        if not answers[-1][0]:
            deadline = min(deadline, time.monotonic() + 10)  # the others wait for the one that failed
    return answers
