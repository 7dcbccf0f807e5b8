"""What this rank updates: a whole parameter that it owns, or its part of a sharded one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dmuon_runtime.buckets import Bucket, Segment
from dmuon_runtime.plan import ParameterPlan
from dmuon_runtime.policy import DTYPE_NAMES, Route
from dmuon_runtime.runtime import Runtime

__all__ = ["Piece", "collect_pieces"]


@dataclass(frozen=True)
class Piece:
    """One parameter's part on this rank: [shape] when the rank owns it, [n] of the flattened one when it is sharded."""

    index: int
    """Index of the parameter in the plan."""
    plan: ParameterPlan
    parameter: nn.Parameter
    bucket: Bucket
    segment: Segment
    master: Tensor

    def view(self, flat: Tensor) -> Tensor:
        """Return the piece's view of a flat tensor that is laid out like the bucket's master."""
        part = flat[self.segment.start : self.segment.stop]
        return part if self.bucket.is_sharded else part.view(self.plan.shape)

    @property
    def counts_here(self) -> bool:
        """True on one rank for each element: replicas of a shard are counted once in norms."""
        return self.bucket.counts_here

    @property
    def gradient(self) -> Tensor:
        """The mean gradient over ranks; there is one when any rank had one."""
        part = self.bucket.gradient_parts.get(self.index)
        if part is None:
            assert self.bucket.gradient is not None, f"{self.plan.name} has no reduced gradient"
            part = self.bucket.gradient_parts[self.index] = self.view(self.bucket.gradient)
        return part

    def make_state(self) -> dict[str, Tensor]:
        """Return zeroed optimizer state in the policy's ``optim_dtype``."""
        zeros = torch.zeros_like(self.master, dtype=DTYPE_NAMES[self.plan.optim_dtype])
        if self.plan.route == "muon":
            return {"momentum_buffer": zeros}
        step = torch.zeros((), dtype=torch.float32, device=self.master.device)
        return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def collect_pieces(runtime: Runtime, routes: Mapping[int, Route]) -> list[Piece]:
    """Return this rank's pieces in plan order, each with the route that its optimizer group gave it.

    ``routes`` is keyed by the id of a parameter that the runtime holds.
    """
    pieces: list[Piece] = []
    for unit in runtime.schedule.units:
        for bucket in unit.buckets:
            for segment in bucket.segments():
                assert bucket.master is not None
                plan = runtime.plan.parameters[segment.parameter_index]
                part = bucket.master[segment.start : segment.stop]
                master = part if bucket.is_sharded else part.view(plan.shape)
                parameter = runtime.parameters[segment.parameter_index]
                if routes[id(parameter)] != plan.route:
                    plan = replace(plan, route=routes[id(parameter)], rule="param_groups")
                pieces.append(Piece(segment.parameter_index, plan, parameter, bucket, segment, master))
    return sorted(pieces, key=lambda piece: piece.index)
