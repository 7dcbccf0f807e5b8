"""A unit: what is materialised and freed together at one boundary module, and when its backward is really over.

Note "When a unit is done": autograd adds all contributions to a parameter before it fires the parameter's accumulate
hook, so a unit whose parameters have all fired needs its weights no more: whatever read a weight has already produced
that weight's gradient. Two things break this. A parameter may get no gradient on this rank; such a unit is done at the
end of the backward. And a call made without gradients (reentrant checkpointing) is replayed inside the backward, each
replay with its own firing; the unit counts such calls and is done only when none is outstanding. A unit with calls of
both kinds since the last backward is done at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import Tensor, nn

from dmuon_runtime.buckets import Bucket
from dmuon_runtime.plan import UnitPlan

__all__ = ["Unit", "UnitState"]


class UnitState(Enum):
    """What is alive of a unit on this rank."""

    FREED = "freed"
    """Parameters have no memory; masters and optimizer state are all there is."""
    GATHERING = "gathering"
    """Buffers are allocated and collectives fill them; contents must not be read."""
    READY = "ready"
    """Parameters hold the current weights."""


class Unit:
    """Runtime side of one :class:`UnitPlan`."""

    def __init__(self, index: int, plan: UnitPlan, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.index = index
        self.plan = plan
        self.module = module
        self.buckets = tuple(buckets)
        self.is_resident = any(bucket.is_resident for bucket in buckets)
        self.state = UnitState.READY if self.is_resident else UnitState.FREED
        self.active_calls = 0
        """Forwards of the module that are running."""
        self.was_called = False
        """Called on this rank since the last optimizer step."""
        self._recorded = self._replayable = self._replayed = 0
        self._fired: set[int] = set()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the unit, bucket by bucket."""
        return [parameter for bucket in self.buckets for parameter in bucket.parameters]

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` is, or is a view of, weights whose memory is given back."""
        if self.is_resident or type(tensor) not in (Tensor, nn.Parameter):
            return False
        address = tensor.untyped_storage().data_ptr()
        return address != 0 and any(bucket.flat.untyped_storage().data_ptr() == address for bucket in self.buckets)

    def issue_gather(self, phase: str) -> None:
        """Start to materialise; buffers that are still alive get the same values again."""
        if self.state is UnitState.GATHERING:
            self.wait_gather()
        for bucket in self.buckets:
            bucket.issue_gather(phase)
        self.state = UnitState.GATHERING

    def wait_gather(self) -> None:
        """Finish materialising; nothing to do when ready."""
        assert self.state is not UnitState.FREED, f"unit {self.plan.name!r} was never gathered"
        for bucket in self.buckets:
            bucket.wait_gather()
        self.state = UnitState.READY

    def free(self) -> None:
        """Give the memory of the parameters back."""
        if self.state is not UnitState.FREED and not self.is_resident:
            for bucket in self.buckets:
                bucket.free()
            self.state = UnitState.FREED

    def begin_call(self, *, with_gradients: bool) -> None:
        """Note a forward outside any backward."""
        self.active_calls += 1
        self.was_called = True
        if with_gradients:
            self._recorded += 1
        else:
            self._replayable += 1

    def begin_replay(self) -> None:
        """Note a forward inside a backward: activation checkpointing computes again what it dropped."""
        self._replayed += 1
        self._fired.clear()

    def note_gradient(self, parameter: nn.Parameter) -> None:
        """Note that autograd has finished a parameter's gradient."""
        self._fired.add(id(parameter))

    @property
    def is_done(self) -> bool:
        """Tell whether no more gradient can come in this backward and the weights are needed no more."""
        if not self.was_called:
            return True
        if self._replayable and (self._recorded or self._replayed < self._replayable):
            return False
        return len(self._fired) == sum(len(bucket.parameters) for bucket in self.buckets)

    @property
    def has_gradients(self) -> bool:
        """Tell whether local gradients wait to be reduced."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def end_backward(self) -> None:
        """Forget what fired in the backward that is over, and the calls that it has answered."""
        self._replayable = max(0, self._replayable - self._replayed)
        self._recorded = self._replayed = 0
        self._fired.clear()

    def end_step(self) -> None:
        """Forget the calls of the step that is over, and free what a lost forward left behind."""
        self.was_called = False
        self.active_calls = 0
        self._recorded = self._replayable = self._replayed = 0
        self._fired.clear()
        self.free()
