"""Gradient reductions in flight: along the shard axis first, then along the replicate axis to where the update is.

The second stage needs the result of the first. On CUDA it follows at once, on a stream beside compute. On a CPU only
the host can tell that the first has ended, so the second is issued when somebody looks, in the order of the first, and
no later than the optimizer call: no rank waits for a reduction inside a backward. With one process group for all of an
axis, the time of looking would decide about the order in it, so there the second stages wait for the optimizer call.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from dmuon_runtime.buckets import Bucket
from dmuon_runtime.transport import Handle, Transport
from dmuon_runtime.unit import Unit

__all__ = ["Reductions"]


class _Reduction:
    """One bucket's gradients on their way."""

    @torch.no_grad()
    def __init__(self, bucket: Bucket, transport: Transport) -> None:
        self._bucket = bucket
        self._transport = transport
        self.is_discarded = False
        self._first: Handle | None = None  # holds the first stage's buffers
        self.is_in_last_stage = transport.replicate.size == 1 or not bucket.is_in_column
        buffer = bucket.take_gradients()
        self._part: Tensor | None
        if bucket.is_sharded:
            self._handle, self._part = transport.reduce_scatter(transport.shard, buffer, bucket.plan.route)
        else:
            self._handle = transport.reduce(transport.shard, buffer, bucket.owner_place[0], bucket.plan.route)
            self._part = buffer if bucket.is_in_column else None

    @property
    def is_completed(self) -> bool:
        """Tell whether the stage that was issued last has ended."""
        return self._handle.is_completed()

    def advance(self) -> None:
        """Issue the second stage behind the first."""
        if self.is_in_last_stage:
            return
        self.is_in_last_stage = True
        assert self._part is not None, "a rank of the owner's column has the sum of its row"
        transport, plan = self._transport, self._bucket.plan
        with transport.aside("reduce"):
            self._handle.wait_aside()
            self._first = self._handle
            self._handle = (
                self._second_stage(self._part)
                if plan.owner is not None
                else transport.all_reduce(transport.replicate, self._part, (plan.route, "reduce"))
            )

    def _second_stage(self, part: Tensor) -> Handle:
        target = self._bucket.owner_place[1]
        return self._transport.reduce(self._transport.replicate, part, target, self._bucket.plan.route)

    def finish(self) -> None:
        """Wait and add the mean to the bucket's gradient, unless it was discarded."""
        assert self.is_in_last_stage
        if self._first is not None:
            self._first.hold_up()
        self._handle.wait()
        self._first = None
        if self._part is not None and self._bucket.is_mine and not self.is_discarded:
            self._bucket.accumulate(self._part)
        self._part = None


class Reductions:
    """All reductions of one model that have not been taken in, in the order in which they were issued."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: deque[_Reduction] = deque()

    def issue(self, unit: Unit) -> None:
        """Start to reduce every bucket of a unit, and take in what has ended; waits for none."""
        for bucket in unit.buckets:
            self._pending.append(_Reduction(bucket, self._transport))
            if self._transport.device.type == "cuda":
                self._pending[-1].advance()
        self._drain()

    def _drain(self) -> None:
        """Bound memory, and let the second stages begin early."""
        if self._transport.eager_reduce:
            for entry in self._pending:
                if not entry.is_completed:
                    break
                entry.advance()
        while self._pending and self._pending[0].is_in_last_stage and self._pending[0].is_completed:
            self._pending.popleft().finish()

    def finish(self) -> None:
        """Wait for all; call it only where every rank has issued the same."""
        for entry in self._pending:
            entry.advance()
        while self._pending:
            self._pending.popleft().finish()

    def discard(self) -> None:
        """Drop the results of everything in flight; the collectives themselves go on."""
        for entry in self._pending:
            entry.is_discarded = True
