"""Steps under torch's profiler, with ranges that say which phase, collective and wait is which."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import _muon
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks._exposed import NEWTON_SCHULZ, STEP, Exposed, most_exposed, read_exposed, read_newton_schulz
from benchmarks.contestants import Contestant
from benchmarks.traces import PREFIX, WAIT
from dmuon_runtime.process_groups import Axis
from dmuon_runtime.runtime import find_runtime
from dmuon_runtime.transport import Handle, Transport

__all__ = ["annotated", "steps_annotated", "trace_steps"]


@contextmanager
def annotated(transport: Transport) -> Iterator[None]:
    """Surround the issue of every collective, and every wait for one, by a range that the trace shows with its name."""
    issue = transport._issue
    numbers = itertools.count()

    def with_range(
        work: Callable[[], object], axis: Axis, lane: str, key: tuple[str, str] | None, keep: tuple[Tensor, ...]
    ) -> Handle:
        name = f"{'control' if key is None else '/'.join(key)}#{next(numbers)}"
        with record_function(PREFIX + name):
            handle = issue(work, axis, lane, key, keep)  # type: ignore[arg-type]
        wait = handle.wait

        def waited() -> None:
            with record_function(WAIT + name):
                wait()

        handle.wait = waited  # type: ignore[method-assign]
        return handle

    transport._issue = with_range  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        vars(transport).pop("_issue")  # the class's method again


@contextmanager
def steps_annotated(contestant: Contestant) -> Iterator[None]:
    """Surround a contestant's forwards, backwards and updates by ranges, torch's Newton-Schulz, and our collectives."""
    plain = _muon._zeropower_via_newtonschulz

    def with_range(*arguments: Any, **named: Any) -> Tensor:
        with record_function(NEWTON_SCHULZ):
            return plain(*arguments, **named)

    contestant.phase = lambda name: record_function(STEP + name)
    _muon._zeropower_via_newtonschulz = with_range
    try:
        with annotated(find_runtime(contestant.model).transport) if contestant.counted else nullcontext():
            yield
    finally:
        contestant.phase = nullcontext
        _muon._zeropower_via_newtonschulz = plain


def trace_steps(contestant: Contestant, step: Callable[[], object], num_steps: int) -> tuple[Exposed, float | None]:
    """Trace ``num_steps`` steps on CUDA after one that is not read.

    Returns what is exposed, of the most exposed rank, and milliseconds of torch's Newton-Schulz in a step, of the
    slowest rank. Collective: every rank traces its own GPU. What is traced runs slower on the host than what is timed.
    """
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with steps_annotated(contestant), profile(activities=both) as taken:
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(num_steps + 1):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        taken.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    mine = read_exposed(trace), read_newton_schulz(trace)
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    spent = [milliseconds for _, milliseconds in everyone if milliseconds is not None]
    return most_exposed([exposed for exposed, _ in everyone]), max(spent, default=None)
