"""One bucket at run time: the flat buffer that parameters are views of, the master weights, the reduced gradient.

The module's parameters are the original objects for good. While materialised their data are views of the bucket's flat
buffer. While freed the buffer's storage has size 0, and the data are one NaN expanded to the full shape: name, shape
and dtype stay, and a read outside the boundary is loud without touching memory that is gone. The buffer object itself
stays, because autograd keeps views of it that are valid again once it is refilled.

With replicas, the ranks of the owner's column in other rows hold a copy of the weights as they were published, from
which their row is filled. With replicated storage the flat buffer itself is that copy, on every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon_runtime.counters import Key
from dmuon_runtime.plan import BucketPlan, RuntimePlan
from dmuon_runtime.policy import DTYPE_NAMES
from dmuon_runtime.publishing import Publication
from dmuon_runtime.transport import Handle, Transport

__all__ = ["Bucket", "Segment"]


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that this rank updates: elements [start, stop) of the rank's flat master."""

    parameter_index: int
    """Index into the plan's parameters."""
    start: int
    stop: int
    parameter_start: int
    """Where it begins in the flattened parameter."""


class Bucket:
    """Buffers of one :class:`BucketPlan` on this rank."""

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter], whole: RuntimePlan, transport: Transport):
        self.plan = plan
        self.parameters = tuple(parameters)
        self.transport = transport
        self._shapes = [whole.parameters[index].shape for index in plan.parameters]
        self._elements = [whole.parameters[index].elements for index in plan.parameters]
        self._is_dense = sum(self._elements) == plan.numel
        self._handle: Handle | None = None
        self.is_sharded = plan.owner is None
        self.is_resident = whole.storage == "replicated"
        """Parameters keep their memory; nothing is materialised, new weights are published to all ranks."""
        self.owner_place = whole.place(plan.owner or 0)
        """Shard and replicate rank of the owner."""
        self.is_in_column = self.is_sharded or self.owner_place[0] == transport.shard.rank
        self.is_mine = self.is_sharded or plan.owner == transport.rank
        self.counts_here = self.is_mine and (not self.is_sharded or transport.replicate.rank == 0)
        """True on one rank for each element that is updated: replicas of a shard are counted once."""
        self._gradient: Tensor | None = None
        self.gradient_parts: dict[int, Tensor] = {}
        """Views of :attr:`gradient` by parameter, as they were asked for: a step asks several times."""
        self.publication = Publication(self)
        self.master, self.copy = self._take_weights()
        self.flat = torch.empty(plan.numel, dtype=DTYPE_NAMES[plan.param_dtype], device=transport.device)
        self._present = self.views(self.flat)
        nothing = torch.full((), math.nan, dtype=self.flat.dtype, device=transport.device)
        self._absent = [nothing.expand(shape) for shape in self._shapes]
        if self.is_resident:
            torch._foreach_copy_(self._present, [parameter.detach() for parameter in self.parameters])
            self._show(self._present)
        self.free()

    @property
    def gradient(self) -> Tensor | None:
        """Mean gradient over ranks since the last zero_grad, flat like ``master``; None before the first reduction."""
        return self._gradient

    @gradient.setter
    def gradient(self, value: Tensor | None) -> None:
        self._gradient, self.gradient_parts = value, {}

    @torch.no_grad()
    def _take_weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what this rank keeps of the original parameters: the master, or what another replica publishes."""
        is_replica = self.is_in_column and not self.is_mine and not self.is_resident
        if not self.is_mine and not is_replica:
            return None, None
        full = torch.zeros(self.plan.numel, dtype=DTYPE_NAMES[self.plan.master_dtype], device=self.transport.device)
        torch._foreach_copy_(self.views(full), [parameter.detach() for parameter in self.parameters])
        if is_replica:
            return None, full.to(DTYPE_NAMES[self.plan.publish_dtype])
        return (self.shard_of(full).clone() if self.is_sharded else full), None

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        """Take whole values of the parameters as the current weights."""
        self.publication.wait()
        full = torch.zeros(self.plan.numel, dtype=DTYPE_NAMES[self.plan.master_dtype], device=self.transport.device)
        for view, value in zip(self.views(full), values, strict=True):
            view.copy_(value)
        if self.master is not None:
            self.master.copy_(self.shard_of(full) if self.is_sharded else full)
        if self.copy is not None:
            self.copy.copy_(full)
        if self.is_resident:
            self.flat.copy_(full.to(DTYPE_NAMES[self.plan.publish_dtype]))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters' views of a flat tensor [numel] of the bucket's layout."""
        return [
            flat[offset : offset + elements].view(shape)
            for offset, elements, shape in zip(self.plan.offsets, self._elements, self._shapes, strict=True)
        ]

    def shard_of(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a flat tensor [numel]."""
        return flat.view(self.transport.shard.size, -1)[self.transport.shard.rank]

    def segments(self) -> list[Segment]:
        """Return what this rank updates, parameter by parameter; a shard may hold parts of some and none of others."""
        if not self.is_mine:
            return []
        share = self.plan.numel // self.transport.shard.size if self.is_sharded else self.plan.numel
        begin = share * self.transport.shard.rank if self.is_sharded else 0
        found: list[Segment] = []
        for index, offset, elements in zip(self.plan.parameters, self.plan.offsets, self._elements, strict=True):
            start, stop = max(offset, begin), min(offset + elements, begin + share)
            if start < stop:
                found.append(Segment(index, start - begin, stop - begin, start - offset))
        return found

    @torch.no_grad()
    def issue_gather(self, phase: str) -> None:
        """Allocate the buffer and start to fill it from the masters, or from what was published last."""
        self._resize(self.plan.gather_bytes)
        self._show(self._present)
        shard = self.transport.shard
        aside = self.publication.is_pending and shard.size > 1
        with self.transport.aside("weights") if aside else contextlib.nullcontext():
            self.publication.wait(aside=aside)
            self._handle = self._fill((self.plan.route, phase))

    def _fill(self, key: Key) -> Handle:
        shard = self.transport.shard
        if self.is_sharded:
            assert self.master is not None
            return self.transport.all_gather(shard, self.flat, self.master.to(self.flat.dtype), key)
        if self.copy is not None:
            self.flat.copy_(self.copy)
        elif self.master is not None:
            self.flat.copy_(self.published() if self.transport.replicate.size > 1 else self.master)
        return self.transport.broadcast(shard, self.flat, self.owner_place[0], key)

    def published(self) -> Tensor:
        """Return the master in the dtype in which other replicas get it, so that all replicas compute alike."""
        assert self.master is not None
        return self.master.to(DTYPE_NAMES[self.plan.publish_dtype])

    def wait_gather(self) -> None:
        """Make the contents usable by the host (CPU) or the current stream (CUDA)."""
        if self.is_resident:
            self.publication.wait()
        if self._handle is not None:
            self.publication.hold_up()
            self._handle.wait()
            self._handle = None
            self.publication.release()

    def free(self) -> None:
        """Give the buffer's memory back; waits first for a collective that still fills it."""
        if self.is_resident:
            return
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
    def take_gradients(self) -> Tensor:
        """Return the local gradients as a flat buffer [numel], zeros where there are none, and clear them."""
        is_filled = self._is_dense and all(parameter.grad is not None for parameter in self.parameters)
        make = torch.empty if is_filled else torch.zeros
        buffer = make(self.plan.numel, dtype=DTYPE_NAMES[self.plan.grad_dtype], device=self.transport.device)
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
            buffer.mul_(1.0 / self.transport.world_size)
        return buffer

    @property
    def _scales_before_sum(self) -> bool:
        """Tell whether a sum over ranks could overflow the gradient dtype."""
        return self.plan.grad_dtype == "float16"

    @torch.no_grad()
    def accumulate(self, total: Tensor) -> None:
        """Add the mean of one reduction, given the sum [like master], which is given away."""
        scale = 1.0 if self._scales_before_sum else 1.0 / self.transport.world_size
        mean = total.to(DTYPE_NAMES[self.plan.optim_dtype])
        is_part = mean.untyped_storage().nbytes() > mean.nbytes  # its buffer would live as long
        if is_part:
            mean = mean * scale
        elif scale != 1.0:
            mean.mul_(scale)
        if self.gradient is None:
            self.gradient = mean
        else:
            self.gradient.add_(mean)
