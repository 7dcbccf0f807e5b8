"""The one seam through which every collective goes: it issues, times and counts them by route and phase.

Note "Three lanes": weights on their way out (materialisations, publications), reductions and control each have process
groups of their own, on each mesh axis. Within a lane of an axis all ranks issue the same collectives in the same order;
across lanes no order is promised, and none is needed, because no rank ever withholds a materialisation while it waits
for a reduction. With ``process_group_policy="shared"`` the first two lanes share the mesh's group of the axis, so
reductions are then held back until all materialisations of a backward are issued.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from dmuon_runtime.counters import Counters, Key
from dmuon_runtime.policy import Route
from dmuon_runtime.process_groups import Axis, Grid
from dmuon_runtime.progress import PROGRESS
from dmuon_runtime.spans import DeviceSpan, Event, HostSpan, Span, Work

__all__ = ["Handle", "Transport"]

# torch 2.13 renamed these two; the old names stay until 2.15 at least, with a warning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """One asynchronous collective: its buffers stay alive until it was waited for."""

    def __init__(self, work: Work | None, span: Span, keep: tuple[Tensor, ...], what: str = "") -> None:
        self._work, self._what = work, what
        self._span = span
        self._keep = keep

    def wait(self) -> None:
        """Block the host (CPU) or the current stream (CUDA) until it has ended; free to call again."""
        if self._work is not None:
            with PROGRESS.waiting(self._what):
                self._span.wait(self._work)
            self._work, self._keep = None, ()

    def wait_aside(self) -> None:
        """Wait on a side stream of :meth:`Transport.aside`: compute does not stand still until :meth:`hold_up`.

        Keep the handle until compute has waited for something behind it: memory of its buffers that is given back
        earlier could be written to while the collective still reads it.
        """
        if self._work is not None:
            self._span.pass_by(self._work)
            self._work = None

    def hold_up(self) -> None:
        """Say that compute is about to wait for something behind it, on the current stream: what is left is exposed."""
        self._span.hold_up()

    def is_completed(self) -> bool:
        """Tell whether it has ended, without waiting."""
        return self._work is None or self._work.is_completed()


class Transport:
    """Collectives of one model over a grid of a shard and a replicate axis."""

    def __init__(self, grid: Grid, counters: Counters) -> None:
        self.counters = counters
        self._grid = grid  # its groups are used again when it is collected
        self.shard, self.replicate = grid.shard, grid.replicate
        self.mesh_shape = (grid.replicate.size, grid.shard.size)
        self.rank: int = grid.replicate.rank * grid.shard.size + grid.shard.rank
        """Position in the plan's numbering, along the mesh."""
        self.ranks = grid.ranks
        """Global ranks by position."""
        self.world_size: int = len(grid.ranks)
        self.device = grid.device
        self._control = grid.control
        self.eager_reduce = grid.isolated
        self._probes: dict[tuple[str, str], torch.cuda.Stream] = {}
        """One for each communicator: a probe takes ends in order, and only one communicator's ends are in order."""
        self._asides: dict[str, torch.cuda.Stream] = {}
        self._last_end: dict[tuple[str, str], Event | None] = {}
        self._spare: list[Event] = []
        self._last_host: dict[tuple[str, str], HostSpan] = {}

    @contextlib.contextmanager
    def aside(self, lane: str) -> Iterator[None]:
        """On CUDA, issue on a side stream that follows the current one, so that waits in it do not hold compute up."""
        if self.device.type != "cuda":
            yield
            return
        if lane not in self._asides:
            self._asides[lane] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._asides[lane].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._asides[lane]):
            yield

    def broadcast(self, axis: Axis, buffer: Tensor, source: int, key: Key | None) -> Handle:
        """Send ``buffer`` of the axis's rank ``source`` to all ranks of the axis, in place."""

        def issue() -> object:
            return dist.broadcast(buffer, group_src=source, group=axis.weights, async_op=True)

        return self._issue(issue, axis, "weights", key, (buffer,))

    def all_gather(self, axis: Axis, output: Tensor, shard: Tensor, key: Key | None) -> Handle:
        """Concatenate every rank's ``shard`` [n] into ``output`` [size * n]; on an axis of 1 this is a copy."""
        if axis.size == 1:
            output.copy_(shard)

        def issue() -> object:
            return _all_gather(output, shard, group=axis.weights, async_op=True)

        return self._issue(issue, axis, "weights", key, (output, shard))

    def reduce(self, axis: Axis, buffer: Tensor, target: int, route: Route) -> Handle:
        """Sum ``buffer`` over the axis into that of rank ``target``; on other ranks its contents are then undefined."""

        def issue() -> object:
            return dist.reduce(buffer, group_dst=target, op=dist.ReduceOp.SUM, group=axis.reduce, async_op=True)

        return self._issue(issue, axis, "reduce", (route, "reduce"), (buffer,))

    def all_reduce(self, axis: Axis, buffer: Tensor, key: Key | None) -> Handle:
        """Sum ``buffer`` over the axis, in place."""

        def issue() -> object:
            return dist.all_reduce(buffer, group=axis.reduce, async_op=True)

        return self._issue(issue, axis, "reduce", key, (buffer,))

    def reduce_scatter(self, axis: Axis, buffer: Tensor, route: Route) -> tuple[Handle, Tensor]:
        """Sum ``buffer`` [size * n] over the axis; return the handle and where this rank's [n] will be.

        gloo has no such collective and emulates it by an all-reduce of a copy; here the copy is saved.
        """
        shard = buffer.view(axis.size, -1)[axis.rank]
        if self.device.type == "cpu" or axis.size == 1:
            return self.all_reduce(axis, buffer, (route, "reduce")), shard
        output = torch.empty_like(shard)

        def issue() -> object:
            return _reduce_scatter(output, buffer, group=axis.reduce, async_op=True)

        return self._issue(issue, axis, "reduce", (route, "reduce"), (buffer, output)), output

    def agree_max(self, values: list[int]) -> list[int]:
        """Return the element-wise maximum over ranks of ``values``, through the host, without touching a device."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int32)
        span = HostSpan()
        with PROGRESS.waiting(f"agreement (collective {PROGRESS.issued()})"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        span.finish()
        self.counters.add_collective(None, tensor.nbytes, span)
        return [int(value) for value in tensor.tolist()]

    def sum_values(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of ``values``, a small tensor on the device of the model."""
        for axis in (self.shard, self.replicate):
            self.all_reduce(axis, values, None).wait()
        return values

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's ``text``; for setup and errors only."""
        if self.world_size == 1:
            return [text]
        texts: list[str | None] = [None] * self.world_size
        span = HostSpan()
        with PROGRESS.waiting(f"exchange of texts (collective {PROGRESS.issued()})"):
            dist.all_gather_object(texts, text, group=self._control)
        span.finish()
        self.counters.add_collective(None, sum(len(item or "") for item in texts), span)
        return [item or "" for item in texts]

    def _issue(
        self, issue: Callable[[], object], axis: Axis, lane: str, key: Key | None, keep: tuple[Tensor, ...]
    ) -> Handle:
        """Issue one collective, unless the axis has one rank; ``keep`` begins with what counts as its payload."""
        if axis.size == 1:
            return Handle(None, HostSpan(), ())
        place = (axis.name, lane)
        span: Span
        if keep[0].device.type == "cuda":
            work = cast(Work, issue())
            span = device_span = self._device_span(place)  # behind it: the host's time to issue is no communication
            span.follow(work)
            self._last_end[place] = device_span.end
        else:
            span = self._last_host[place] = HostSpan(self._last_host.get(place))
            work = cast(Work, issue())
            span.follow(work)
        self.counters.add_collective(key, keep[0].nbytes, span)
        route, phase = key or ("control", lane)
        what = f"{phase} of {route} on the {axis.name} axis (collective {PROGRESS.issued()}, {keep[0].nbytes} bytes)"
        return Handle(work, span, keep, what)

    def _device_span(self, place: tuple[str, str]) -> DeviceSpan:
        if place not in self._probes:
            self._probes[place] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return DeviceSpan(self._probes[place], self._last_end.get(place), self._spare)
