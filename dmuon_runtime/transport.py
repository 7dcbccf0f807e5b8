"""The one seam through which every collective goes: it issues, times and counts them by route and phase.

Note "Three lanes": materialisations, reductions and control each have a process group of their own. Within a lane all
ranks issue the same collectives in the same order; across lanes no order is promised, and none is needed, because no
rank ever withholds a materialisation while it waits for a reduction. With ``process_group_policy="shared"`` the first
two lanes share the mesh's group, so reductions are then held back until all materialisations of a backward are issued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dmuon_runtime.counters import Counters, Key
from dmuon_runtime.errors import MeshError
from dmuon_runtime.policy import Route
from dmuon_runtime.spans import DeviceSpan, Event, HostSpan, Span, Work

__all__ = ["Handle", "Transport"]

# torch 2.13 renamed these two; the old names stay until 2.15 at least, with a warning.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """One asynchronous collective: its buffers stay alive until it was waited for."""

    def __init__(self, work: Work | None, span: Span, keep: tuple[Tensor, ...]) -> None:
        self._work = work
        self._span = span
        self._keep = keep

    def wait(self) -> None:
        """Block the host (CPU) or the current stream (CUDA) until it has ended; free to call again."""
        if self._work is not None:
            self._span.wait(self._work)
            self._work, self._keep = None, ()

    def is_completed(self) -> bool:
        """Tell whether it has ended, without waiting."""
        return self._work is None or self._work.is_completed()


class Transport:
    """Collectives of one model over a 1-D mesh axis. Ranks are positions on that axis."""

    def __init__(self, mesh: DeviceMesh, policy: str, counters: Counters) -> None:
        if mesh.ndim != 1:
            raise MeshError(
                f"the shard mesh must have 1 axis, not {mesh.ndim} ({mesh.mesh_dim_names}); pass the shard axis"
            )
        if mesh.get_coordinate() is None:
            raise MeshError(f"global rank {dist.get_rank()} is not on the mesh; call dedicate_params only on its ranks")
        base = mesh.get_group()
        ranks = dist.get_process_group_ranks(base)
        self.counters = counters
        self.rank: int = mesh.get_local_rank()
        self.world_size: int = len(ranks)
        cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._control = _new_group(ranks, "gloo")
        isolated = policy == "isolated"
        backend = dist.get_backend(base)
        self._gather = _new_group(ranks, backend) if isolated else base
        self._reduce = _new_group(ranks, backend) if isolated else base
        self.eager_reduce = isolated
        self._probe = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        self._last_end: dict[str, Event | None] = {}
        self._last_host: dict[str, HostSpan] = {}

    def broadcast(self, buffer: Tensor, owner: int, route: Route, phase: str) -> Handle:
        """Send the owner's flat ``buffer`` to all ranks, in place."""

        def issue() -> object:
            return dist.broadcast(buffer, group_src=owner, group=self._gather, async_op=True)

        return self._issue(issue, (route, phase), "gather", buffer, (buffer,))

    def all_gather(self, output: Tensor, shard: Tensor, route: Route, phase: str) -> Handle:
        """Concatenate every rank's ``shard`` [n] into ``output`` [world * n]."""

        def issue() -> object:
            return _all_gather(output, shard, group=self._gather, async_op=True)

        return self._issue(issue, (route, phase), "gather", output, (output, shard))

    def reduce(self, buffer: Tensor, owner: int, route: Route) -> Handle:
        """Sum ``buffer`` over all ranks into the owner's; on other ranks its contents are then undefined."""

        def issue() -> object:
            return dist.reduce(buffer, group_dst=owner, op=dist.ReduceOp.SUM, group=self._reduce, async_op=True)

        return self._issue(issue, (route, "reduce"), "reduce", buffer, (buffer,))

    def reduce_scatter(self, buffer: Tensor, route: Route) -> tuple[Handle, Tensor]:
        """Sum ``buffer`` [world * n] over all ranks; return the handle and where this rank's [n] will be.

        gloo has no such collective and emulates it by an all-reduce of a copy; here the copy is saved.
        """
        shard = buffer.view(self.world_size, -1)[self.rank]
        if self.device.type == "cpu":

            def all_reduce() -> object:
                return dist.all_reduce(buffer, group=self._reduce, async_op=True)

            return self._issue(all_reduce, (route, "reduce"), "reduce", buffer, (buffer,)), shard
        output = torch.empty_like(shard)

        def issue() -> object:
            return _reduce_scatter(output, buffer, group=self._reduce, async_op=True)

        return self._issue(issue, (route, "reduce"), "reduce", buffer, (buffer, output)), output

    def agree_max(self, values: list[int]) -> list[int]:
        """Return the element-wise maximum over ranks of ``values``, through the host, without touching a device."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int32)
        span = HostSpan()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)
        span.finish()
        self.counters.add_collective(None, tensor.nbytes, span)
        return [int(value) for value in tensor.tolist()]

    def sum_values(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of ``values``, a small tensor on the device of the model."""
        if self.world_size == 1:
            return values

        def issue() -> object:
            return dist.all_reduce(values, group=self._reduce, async_op=True)

        self._issue(issue, None, "reduce", values, (values,)).wait()
        return values

    def gather_texts(self, text: str) -> list[str]:
        """Return every rank's ``text``; for setup and errors only."""
        if self.world_size == 1:
            return [text]
        texts: list[str | None] = [None] * self.world_size
        span = HostSpan()
        dist.all_gather_object(texts, text, group=self._control)
        span.finish()
        self.counters.add_collective(None, sum(len(item or "") for item in texts), span)
        return [item or "" for item in texts]

    def gather_tensor(self, owner: int | None, buffer: Tensor, shard: Tensor | None) -> None:
        """Fill ``buffer`` on all ranks from its owner, or from every rank's ``shard``; for checkpoints."""
        if self.world_size == 1:
            if shard is not None:
                buffer.copy_(shard)
            return

        def issue() -> object:
            if owner is not None:
                return dist.broadcast(buffer, group_src=owner, group=self._gather, async_op=True)
            return _all_gather(buffer, shard, group=self._gather, async_op=True)

        self._issue(issue, None, "gather", buffer, (buffer,)).wait()

    def _issue(
        self, issue: Callable[[], object], key: Key | None, lane: str, payload: Tensor, keep: tuple[Tensor, ...]
    ) -> Handle:
        if self.world_size == 1:
            return Handle(None, HostSpan(), ())
        on_device = payload.device.type == "cuda"
        span = DeviceSpan(self._probe, self._last_end.get(lane)) if on_device else HostSpan(self._last_host.get(lane))
        work = cast(Work, issue())
        span.follow(work)
        if isinstance(span, DeviceSpan):
            self._last_end[lane] = span.end
        else:
            self._last_host[lane] = span
        self.counters.add_collective(key, payload.nbytes, span)
        return Handle(work, span, keep)


def _new_group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(ranks, backend=backend, use_local_synchronization=True))
