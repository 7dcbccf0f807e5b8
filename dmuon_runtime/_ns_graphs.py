"""CUDA graphs of Newton-Schulz groups: one graph a group, bounded in number and in memory.

A graph is keyed by everything that could change the work. Its inputs lie in an arena that all graphs share and its
temporaries in one memory pool, which is safe because a group's inputs are written right before its replay and its
last product is done right after, on one stream. Launches are counted when the graph is captured and added to the
ledger at every replay.

Note "A graph owns its cuBLAS workspace". torch keeps one workspace for each handle and stream, made on first use, and
frees it when anybody asks (CUDA graphs of torch.compile do): a graph that had captured it would then write to memory
that is no longer there, and the device faults. So torch forgets its workspaces before a capture, which makes cuBLAS
take one from the graph's own pool, and again after it, so that nobody else ever uses that one.

Note "A capture that fails". Nothing that was captured has run, so the step loses nothing: the group runs eagerly, now
and from then on. torch ends a capture that broke CUDA's rules halfway, and the rest is done here: the stream of before
comes back, the allocator stops recording, and the pool is left to what lives in it. Then the device is asked whether
it still works, the only wait: if it does not, that is what is raised.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_runtime._ns_iterations import Long
from dmuon_runtime.ledger import LEDGER, Launches

__all__ = ["Captured", "GraphCache"]

Unfinished = tuple[list[Long], Tensor]
"""Stacks and the last Q of an iteration: the last product is still to be done."""
Work = Callable[[Sequence[Tensor]], Unfinished]

MAX_GRAPHS = 64
MAX_SEEN = 1024
"""Keys remembered as having run once."""
MAX_MEMORY_SHARE = 0.25
"""Of the device's memory, for what graphs keep between replays."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Captured:
    """A captured group. ``inputs`` [b, rows, cols] are to be written before, ``unfinished`` read after a replay."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    unfinished: Unfinished
    launches: Launches

    def replay(self) -> Unfinished:
        """Run the group on the current stream, count what it launches and return what is left to do."""
        self.graph.replay()
        LEDGER.add_launches(self.launches)
        return self.unfinished

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps alive between replays."""
        longs, q = self.unfinished
        return [*self.inputs, *(long.x for long in longs), q]


class GraphCache:
    """Graphs by key, the least recently used leaving first when there are too many or they keep too much memory.

    The newest always stays. Temporaries, which all graphs share, are not counted.
    """

    def __init__(self, max_graphs: int = MAX_GRAPHS, max_bytes: int | None = None) -> None:
        self._graphs: OrderedDict[Hashable, Captured] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._arenas: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._pools: dict[torch.device, Any] = {}
        self._max_graphs, self._max_bytes = max_graphs, max_bytes
        self._told = False
        self._refused: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()  # allocators may still ask a graph
        self._causes: set[str] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Hashable) -> Captured | None:
        """Return the graph of ``key``, if there is one."""
        found = self._graphs.get(key)
        if found is not None:
            self._graphs.move_to_end(key)
        return found

    def worth_capturing(self, key: Hashable) -> bool:
        """True from the second time on: the first runs eagerly, which compiles what the graph will launch.

        False for good once a capture failed.
        """
        if key in self._refused:
            return False
        if key in self._seen:
            return True
        _remember(self._seen, key, None)
        return False

    @property
    def num_refused(self) -> int:
        """Keys that run eagerly because their capture failed."""
        return len(self._refused)

    def inputs(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return views [b, rows, cols] of the shared arena, one a shape, none overlapping."""
        sizes = [-(-b * m * n // 64) * 64 for b, m, n in shapes]
        needed = sum(sizes)
        arena = self._arenas.get((device, dtype))
        if arena is None or arena.numel() < needed:
            arena = torch.empty(needed, dtype=dtype, device=device)
            self._arenas[device, dtype] = arena  # an older arena lives on in the graphs that were captured on it
        views, begin = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            views.append(arena[begin : begin + shape[0] * shape[1] * shape[2]].view(shape))
            begin += size
        return views

    def capture(self, key: Hashable, inputs: list[Tensor], work: Work) -> Captured | None:
        """Capture ``work(inputs)``; what ``inputs`` hold is not changed.

        None where that fails, which is logged once for each cause: the key is to run eagerly from then on.

        Raises:
            RuntimeError: (as torch's ``AcceleratorError``) the device itself has failed.
        """
        device, graph = inputs[0].device, torch.cuda.CUDAGraph()
        try:
            with LEDGER.recording() as launches, self._capturing(graph, device):
                unfinished = work(inputs)
        except Exception as error:  # whatever a kernel or CUDA has against being captured
            torch.cuda.synchronize(device)
            _free_generator(device)
            self._refuse(key, graph, error)
            return None
        captured = Captured(graph, inputs, unfinished, launches)
        self.keep(key, captured)
        return captured

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
        """Capture into the pool of ``device``; see the notes at the top for what is done around it."""
        pool = self._pools.setdefault(device, torch.cuda.graph_pool_handle())
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with (
                torch.cuda.device(device),
                torch.cuda.stream(torch.cuda.current_stream(device)),  # torch forgets to go back where the end fails
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                yield
        except BaseException:
            _stop_recording(device, self._pools.pop(device))
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def _refuse(self, key: Hashable, graph: torch.cuda.CUDAGraph, error: Exception) -> None:
        _remember(self._refused, key, graph)
        cause = f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
        if cause not in self._causes:
            self._causes.add(cause)
            _log.warning("Newton-Schulz runs a group without a CUDA graph from now on: capturing failed: %s", cause)

    def keep(self, key: Hashable, captured: Captured) -> None:
        """Add a graph, and let the least recently used go where that is too much."""
        self._graphs[key] = captured
        limit = self._limit(captured.inputs[0].device)
        while len(self._graphs) > 1 and (len(self._graphs) > self._max_graphs or self.held_bytes() > limit):
            gone, _ = self._graphs.popitem(last=False)
            self._seen.pop(gone, None)  # it has to run twice more before it is captured again
            if not self._told:
                self._told = True
                _log.warning(
                    "Newton-Schulz drops CUDA graphs: more than %d, or more than %.1f GiB, are needed in turn",
                    self._max_graphs, limit / 2**30,
                )  # fmt: skip

    def held_bytes(self) -> int:
        """Return the bytes of arenas and outputs that are kept, shared memory counted once."""
        tensors = [*self._arenas.values(), *(x for captured in self._graphs.values() for x in captured.tensors)]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())

    def _limit(self, device: torch.device) -> float:
        if self._max_bytes is not None:
            return float(self._max_bytes)
        if device.type != "cuda":
            return float("inf")
        return MAX_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory

    def clear(self) -> None:
        """Drop every graph and the memory behind them."""
        self._graphs.clear()
        self._seen.clear()
        self._arenas.clear()
        self._pools.clear()


def _remember(keys: OrderedDict[Hashable, Any], key: Hashable, value: object) -> None:
    keys[key] = value
    while len(keys) > MAX_SEEN:
        keys.popitem(last=False)


def _stop_recording(device: torch.device, pool: Any) -> None:
    """Take back what a capture that did not come to its end still has of the allocator."""
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return  # torch came as far as that, and lets go of the pool with the graph
    torch._C._cuda_releasePool(device.index, pool)


def _free_generator(device: torch.device) -> None:
    """Let random numbers be drawn on ``device`` again, in the order of before, where a broken capture forbids it."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    try:
        torch.empty(1, device=device).uniform_()
    except RuntimeError:  # it still takes itself to be captured; what it counts is right
        generator.graphsafe_set_state(generator.clone_state())
    else:
        generator.set_state(before)
