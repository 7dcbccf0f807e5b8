"""One bucket at run time: the flat buffer that parameters are views of, the master weights, the reduced gradient.

The module's parameters are the original objects for good. While materialised their data are views of the bucket's flat
buffer. While freed the buffer's storage has size 0, and the data are one NaN expanded to the full shape: name, shape
and dtype stay, and a read outside the boundary is loud without touching memory that is gone. The buffer object itself
stays, because autograd keeps views of it that are valid again once it is refilled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon_runtime.plan import BucketPlan, RuntimePlan
from dmuon_runtime.policy import DTYPE_NAMES
from dmuon_runtime.transport import Handle, Transport

__all__ = ["Bucket", "PendingReduce", "Segment"]


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that this rank updates: elements [start, stop) of the rank's flat master."""

    parameter_index: int
    """Index into the plan's parameters."""
    start: int
    stop: int
    parameter_start: int
    """Where it begins in the flattened parameter."""


@dataclass
class PendingReduce:
    """A gradient reduction in flight."""

    bucket: Bucket
    handle: Handle
    result: Tensor | None
    """Where the sum will be, on ranks that receive it."""
    discarded: bool = False

    def finish(self) -> None:
        """Wait and add the mean to the bucket's gradient, unless it was discarded."""
        self.handle.wait()
        if self.result is not None and not self.discarded:
            self.bucket.accumulate(self.result)
        self.result = None


class Bucket:
    """Buffers of one :class:`BucketPlan` on this rank."""

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter], whole: RuntimePlan, transport: Transport):
        self.plan = plan
        self.parameters = tuple(parameters)
        self._transport = transport
        self._shapes = [whole.parameters[index].shape for index in plan.parameters]
        self._elements = [whole.parameters[index].elements for index in plan.parameters]
        self._handle: Handle | None = None
        self.is_sharded = plan.owner is None
        self.is_mine = self.is_sharded or plan.owner == transport.rank
        self.gradient: Tensor | None = None
        """Mean gradient over ranks since the last zero_grad, flat like ``master``; None before the first reduction."""
        self.master = self._take_master()
        self.flat = torch.empty(plan.numel, dtype=DTYPE_NAMES[plan.param_dtype], device=transport.device)
        self._present = self.views(self.flat)
        nothing = torch.full((), math.nan, dtype=self.flat.dtype, device=transport.device)
        self._absent = [nothing.expand(shape) for shape in self._shapes]
        self.free()

    @torch.no_grad()
    def _take_master(self) -> Tensor | None:
        """Copy what this rank owns out of the original parameters; None when it owns nothing here."""
        if not self.is_mine:
            return None
        dtype = DTYPE_NAMES[self.plan.master_dtype]
        full = torch.zeros(self.plan.numel, dtype=dtype, device=self._transport.device)
        torch._foreach_copy_(self.views(full), [parameter.detach() for parameter in self.parameters])
        return self.shard_of(full).clone() if self.is_sharded else full

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters' views of a flat tensor [numel] of the bucket's layout."""
        return [
            flat[offset : offset + elements].view(shape)
            for offset, elements, shape in zip(self.plan.offsets, self._elements, self._shapes, strict=True)
        ]

    def shard_of(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a flat tensor [numel]."""
        return flat.view(self._transport.world_size, -1)[self._transport.rank]

    def segments(self) -> list[Segment]:
        """Return what this rank updates, parameter by parameter; a shard may hold parts of some and none of others."""
        if not self.is_mine:
            return []
        share = self.plan.numel // self._transport.world_size if self.is_sharded else self.plan.numel
        begin = share * self._transport.rank if self.is_sharded else 0
        found: list[Segment] = []
        for index, offset, elements in zip(self.plan.parameters, self.plan.offsets, self._elements, strict=True):
            start, stop = max(offset, begin), min(offset + elements, begin + share)
            if start < stop:
                found.append(Segment(index, start - begin, stop - begin, start - offset))
        return found

    @torch.no_grad()
    def issue_gather(self, phase: str) -> None:
        """Allocate the buffer and start to fill it from the masters."""
        self._resize(self.plan.gather_bytes)
        self._show(self._present)
        if self.is_sharded:
            assert self.master is not None
            shard = self.master.to(self.flat.dtype)
            if self._transport.world_size == 1:
                self.flat.copy_(shard)
            else:
                self._handle = self._transport.all_gather(self.flat, shard, self.plan.route, phase)
            return
        if self.master is not None:
            self.flat.copy_(self.master)
        self._handle = self._transport.broadcast(self.flat, self.plan.owner or 0, self.plan.route, phase)

    def wait_gather(self) -> None:
        """Make the contents usable by the host (CPU) or the current stream (CUDA)."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None

    def free(self) -> None:
        """Give the buffer's memory back; waits first for a collective that still fills it."""
        self.wait_gather()
        self._show(self._absent)
        self._resize(0)

    def _show(self, contents: Sequence[Tensor]) -> None:
        for parameter, data in zip(self.parameters, contents, strict=True):
            parameter.data = data

    def _resize(self, num_bytes: int) -> None:
        storage = self.flat.untyped_storage()
        if storage.nbytes() != num_bytes:
            storage.resize_(num_bytes)

    @torch.no_grad()
    def issue_reduce(self) -> PendingReduce:
        """Start to sum the local gradients over ranks; a parameter without one contributes zeros."""
        buffer = torch.zeros(self.plan.numel, dtype=DTYPE_NAMES[self.plan.grad_dtype], device=self._transport.device)
        pairs = [
            (view, parameter.grad)
            for view, parameter in zip(self.views(buffer), self.parameters, strict=True)
            if parameter.grad is not None
        ]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        for parameter in self.parameters:
            parameter.grad = None
        if self._scales_before_sum:
            buffer.mul_(1.0 / self._transport.world_size)
        if self.is_sharded:
            handle, shard = self._transport.reduce_scatter(buffer, self.plan.route)
            return PendingReduce(self, handle, shard)
        handle = self._transport.reduce(buffer, self.plan.owner or 0, self.plan.route)
        return PendingReduce(self, handle, buffer if self.is_mine else None)

    @property
    def _scales_before_sum(self) -> bool:
        """Tell whether a sum over ranks could overflow the gradient dtype."""
        return self.plan.grad_dtype == "float16"

    @torch.no_grad()
    def accumulate(self, total: Tensor) -> None:
        """Add the mean of one reduction, given the sum [like master]."""
        scale = 1.0 if self._scales_before_sum else 1.0 / self._transport.world_size
        mean = total.to(DTYPE_NAMES[self.plan.optim_dtype]) * scale
        if self.gradient is None:
            self.gradient = mean
        else:
            self.gradient.add_(mean)
