"""How new weights reach ranks that keep a copy of them: one publication of a bucket at a time.

With replicas the owner broadcasts along the replicate axis to its column; every row then materialises from its own
copy. With replicated storage the owner broadcasts to all ranks, and shards are gathered by all. A publication is issued
right after the update and waited for by whatever reads the copy next: the unit's next materialisation, its next
forward, or the next update. No rank waits for long: every rank of the axis has issued it in the same step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmuon_runtime.policy import DTYPE_NAMES

if TYPE_CHECKING:
    from dmuon_runtime.buckets import Bucket
    from dmuon_runtime.transport import Handle
    from dmuon_runtime.unit import Unit

__all__ = ["Publication", "publish"]


class Publication:
    """The publication of one bucket, if one is under way."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._handle: Handle | None = None
        self._landing: Tensor | None = None
        self._spent: Handle | None = None

    def hold_up(self) -> None:
        """Say that compute is about to wait for what was issued behind it, if something was."""
        if self._spent is not None:
            self._spent.hold_up()

    def release(self) -> None:
        """Give back what was published: compute has waited for something behind it."""
        self._spent = None

    @property
    def is_pending(self) -> bool:
        """Tell whether one was issued and not waited for."""
        return self._handle is not None

    def issue(self) -> None:
        """Start to send or receive the current weights, if this rank keeps or gives a copy."""
        self.wait()
        bucket = self._bucket
        key = (bucket.plan.route, "publish")
        if bucket.is_resident:
            self._landing = self._make_landing(bucket)
            if bucket.is_sharded:
                self._handle = bucket.transport.all_gather(
                    bucket.transport.shard, self._landing, bucket.published(), key
                )
            else:
                if bucket.is_mine:
                    self._landing.copy_(bucket.published())
                self._handle = bucket.transport.broadcast(
                    bucket.transport.shard, self._landing, bucket.owner_place[0], key
                )
        elif bucket.is_in_column and not bucket.is_sharded and bucket.transport.replicate.size > 1:
            payload = bucket.copy if bucket.copy is not None else bucket.published()
            self._handle = bucket.transport.broadcast(bucket.transport.replicate, payload, bucket.owner_place[1], key)

    @staticmethod
    def _make_landing(bucket: Bucket) -> Tensor:
        dtype = DTYPE_NAMES[bucket.plan.publish_dtype]
        return bucket.flat if bucket.flat.dtype is dtype else torch.empty_like(bucket.flat, dtype=dtype)

    def wait(self, *, aside: bool = False) -> None:
        """Make the published weights usable; ``aside`` when the current stream is one beside compute."""
        if self._handle is None:
            return
        if aside:
            self._handle.wait_aside()
            self._spent = self._handle
        else:
            self._handle.wait()
        if self._landing is not None and self._landing is not self._bucket.flat:
            self._bucket.flat.copy_(self._landing)
        self._handle = self._landing = None


@torch.no_grad()
def publish(units: Iterable[Unit], present: list[bool], *, wait: bool) -> None:
    """Publish every bucket with a parameter that is ``present`` (by plan index), in the order of ``units``."""
    buckets = [bucket for unit in units for bucket in unit.buckets]
    for bucket in buckets:
        if any(present[index] for index in bucket.plan.parameters):
            bucket.publication.issue()
    if wait:
        for bucket in buckets:
            bucket.publication.wait()
