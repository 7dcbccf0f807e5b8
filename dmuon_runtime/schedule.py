"""The order of all collectives, and how ranks whose execution differs stay in it.

Note "One schedule, settled at sync points". A *round* materialises every unit once, in forward order (the plan's, then
the one recorded in the first step). A *half* is one
backward: it materialises units in backward order (Z3) and reduces them in reverse forward order. A rank that needs a
unit first issues everything before it in the order, so units that it skips are issued as well, and what is left is
issued when the round or half ends on that rank. Inside a round or half, ranks may therefore differ at will.

Before each round, half and optimizer call the ranks meet at a *sync point*: one small maximum over ranks, through the
host, of what each wants to do next. The outcome is a function of that maximum, so all ranks decide alike:

- somebody begins a pass, or all repeat: a round starts; a rank that wanted something else issues all of it at once;
- else somebody needs a freed unit again in the same forward: just those units are gathered;
- else somebody begins a backward: a half starts; the others contribute zeros;
- else somebody holds gradients that no half has taken: a half without materialisation;
- else all ranks are at the same optimizer call and go on together.

No deadlock: inside a round or half a rank blocks only on a materialisation that it has issued, and never on a
reduction. Take the first materialisation that is not complete. A rank that waits for it or a later one has issued it; a
rank that does not wait makes progress and issues it when it needs a later one or ends the round or half. So every rank
issues it, and it completes. At a sync point every rank has issued all of the round or half before.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum

from dmuon_runtime.errors import CallMismatch, PeerFailed
from dmuon_runtime.orders import Orders
from dmuon_runtime.publishing import publish
from dmuon_runtime.reductions import Reductions
from dmuon_runtime.transport import Transport
from dmuon_runtime.unit import Unit, UnitState

__all__ = ["Call", "Schedule", "Stage"]


class Stage(Enum):
    """Where the ranks are together."""

    IDLE = "idle"
    """Between rounds and halves; every collective of the last one is issued."""
    FORWARD = "forward"
    """A round is open: units are materialised on demand, in order."""
    BACKWARD = "backward"
    """A half is open: units are materialised and reduced, each in its own order."""


class Call(IntEnum):
    """Optimizer-level calls that all ranks must make together."""

    STEP = 1
    CLIP = 2
    SAVE = 3
    LOAD = 4


class _Intent(IntEnum):
    """What a rank wants next; also its place in the vector that ranks take the maximum of."""

    PASS = 0
    REPEAT = 1
    BACKWARD = 2
    REDUCE = 3
    CALL = 4


_NUM_INTENTS = len(_Intent)
_SYNCED = _NUM_INTENTS  # somebody's half reduces gradients
_CALL_MAX, _CALL_MIN, _HALVES_MAX, _HALVES_MIN = range(_NUM_INTENTS + 1, _NUM_INTENTS + 5)
_FAILED = _NUM_INTENTS + 5  # somebody raised and goes no further
_HEADER = _NUM_INTENTS + 6


class Schedule:
    """Issues every materialisation and reduction of one model on this rank."""

    def __init__(
        self, units: Sequence[Unit], backward_order: Sequence[int], reshard: bool, transport: Transport
    ) -> None:
        self.units = tuple(units)
        self.stage = Stage.IDLE
        self.no_sync_depth = 0
        self._orders = Orders(self.units, backward_order)
        self._reshard = reshard
        self._transport = transport
        self._forward_cursor = self._gather_cursor = self._reduce_cursor = 0
        self._resident = any(unit.is_resident for unit in units)  # replicated storage: nothing is gathered or freed
        self._held = self._resident  # Z2: every unit was materialised in this round and stays until the half ends
        self._gathers = self._reduces = False
        self._reductions = Reductions(transport)
        self._halves = 0  # since the last zero_grad
        self._presence = [0] * sum(len(unit.plan.parameters) for unit in self.units)
        self._parameter_index = {
            id(parameter): index
            for unit in self.units
            for bucket in unit.buckets
            for parameter, index in zip(bucket.parameters, bucket.plan.parameters, strict=True)
        }

    # ---- forward

    def need_forward(self, unit: Unit) -> None:
        """Materialise ``unit`` for a forward, and start on the next one."""
        self._orders.seen_forward.append(unit.index)
        if unit.state is UnitState.FREED:
            self._enter_round(unit)
        if self.stage is Stage.FORWARD:
            self._issue_forward(self._orders.forward_place[unit.index] + 2)
        unit.wait_gather()

    def _enter_round(self, unit: Unit) -> None:
        """Make sure that the collective of a freed ``unit`` is still to come or was just issued for it alone."""
        if self.stage is Stage.BACKWARD:  # a backward that failed, or a rank that left one early
            self.end_half()
        if self.stage is Stage.IDLE:
            self._sync(_Intent.PASS)
        elif self._orders.forward_place[unit.index] < self._forward_cursor:
            self._sync(_Intent.REPEAT, unit)

    def _issue_forward(self, stop: int) -> None:
        while self._forward_cursor < min(stop, len(self.units)):
            self._orders.forward[self._forward_cursor].issue_gather("forward")
            self._forward_cursor += 1

    def after_forward(self, unit: Unit) -> None:
        """Free a unit whose last running forward has ended (Z3)."""
        unit.active_calls = max(0, unit.active_calls - 1)
        if self.stage is not Stage.BACKWARD:
            self._free_unused(unit)

    def _end_round(self) -> None:
        """Issue what this rank skipped and free what it does not use (Z3)."""
        if self.stage is not Stage.FORWARD:
            return
        while self._forward_cursor < len(self.units):
            self._issue_forward(self._forward_cursor + 1)
            self._free_unused(self._orders.forward[self._forward_cursor - 1])
        for unit in self.units:
            self._free_unused(unit)

    def _free_unused(self, unit: Unit) -> None:
        if self._reshard:
            self._free_idle(unit)

    # ---- backward

    def begin_half(self) -> None:
        """Open a half for a backward that starts on this rank."""
        if self.stage is Stage.BACKWARD:
            self.end_half()
        self._sync(_Intent.BACKWARD)

    def need_backward(self, unit: Unit) -> None:
        """Materialise ``unit`` inside a half, and start on the next one of the backward order."""
        self._orders.seen_backward.append(unit.index)
        if self._gathers:
            self._issue_backward(self._orders.backward_place[unit.index] + 2)
        assert unit.state is not UnitState.FREED, f"unit {unit.plan.name!r} was freed before its backward had ended"
        unit.wait_gather()

    def _issue_backward(self, stop: int) -> None:
        while self._gather_cursor < min(stop, len(self.units)):
            self._orders.backward[self._gather_cursor].issue_gather("backward")
            self._gather_cursor += 1

    def gradient_ready(self, unit: Unit) -> None:
        """Free a unit whose backward is over, and reduce as far as the order allows."""
        if not unit.is_done:
            return
        self._orders.seen_done.append(unit.index)
        if self._transport.eager_reduce:
            self._issue_reduces(only_done=True)
        if self._reduces or self._reshard:
            unit.free()

    def _issue_reduces(self, *, only_done: bool) -> None:
        while self._reduces and self._reduce_cursor < len(self.units):
            unit = self._orders.reduce[self._reduce_cursor]
            if only_done and not unit.is_done:
                return
            self._note_presence(unit)
            self._reductions.issue(unit)
            self._reduce_cursor += 1

    def _note_presence(self, unit: Unit) -> None:
        for parameter in unit.parameters:
            if parameter.grad is not None:
                self._presence[self._parameter_index[id(parameter)]] = 1

    def end_half(self) -> None:
        """Issue everything of the half that is left on this rank; afterwards nothing of it is owed to any other."""
        if self.stage is not Stage.BACKWARD:
            return
        if self._gathers:
            while self._gather_cursor < len(self.units):
                self._issue_backward(self._gather_cursor + 1)
                self._free_idle(self._orders.backward[self._gather_cursor - 1])
        self._issue_reduces(only_done=False)
        self._held = self._resident or (
            self._held and not self._reduces
        )  # Z2 keeps weights over the micro-batches of no_sync
        for unit in self.units:
            unit.end_backward()
            if not self._held:
                self._free_idle(unit)
        self.stage = Stage.IDLE

    @staticmethod
    def _free_idle(unit: Unit) -> None:
        """Free a unit unless a forward of it is running: a forward may itself run a backward."""
        if unit.active_calls == 0:
            unit.free()

    # ---- sync points

    def meet(self, call: Call) -> list[bool]:
        """Bring all ranks to the same optimizer call with every gradient reduced.

        Returns, for each parameter of the plan, whether any rank had a gradient since the last ``zero_grad``. Raises
        :class:`CallMismatch` on all ranks when they make different calls.
        """
        if self.stage is Stage.BACKWARD:
            self.end_half()
        while any(unit.has_gradients for unit in self.units):
            self._sync(_Intent.REDUCE)
            self.end_half()
        agreed = self._sync(_Intent.CALL, call=call)
        self.stage = Stage.IDLE
        self._reductions.finish()
        if agreed[_CALL_MAX] != -agreed[_CALL_MIN]:
            names = (Call(agreed[_CALL_MAX]).name.lower(), Call(-agreed[_CALL_MIN]).name.lower())
            raise CallMismatch(f"ranks call {names[0]} and {names[1]} at the same point; make the same calls", names)
        self._settle_zeroed(agreed[_HALVES_MAX], -agreed[_HALVES_MIN])
        if call is Call.STEP:
            self._orders.adopt(self._transport)
        return [bool(value) for value in agreed[_HEADER + len(self.units) :]]

    def _settle_zeroed(self, most: int, fewest: int) -> None:
        """A rank that sat a backward out cannot see when the others called zero_grad; their count tells."""
        if most != fewest and fewest > 0:
            raise CallMismatch(
                f"between two optimizer calls one rank has gradients of {most} backwards and another of {fewest}; call "
                "zero_grad at the same place on every rank"
            )
        if fewest == 0:
            self._halves = 0
            for unit in self.units:
                for bucket in unit.buckets:
                    bucket.gradient = None

    def zero_grad(self) -> None:
        """Drop every gradient of this rank: local, in flight and reduced."""
        self._reductions.discard()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.gradient = None
                for parameter in bucket.parameters:
                    parameter.grad = None
        self._presence = [0] * len(self._presence)
        self._halves = 0

    def end_step(self) -> None:
        """Weights have changed: free everything that still shows the old ones."""
        for unit in self.units:
            unit.end_step()
        self.stage = Stage.IDLE
        self._held = self._resident

    def publish(self, present: list[bool], *, wait: bool) -> None:
        """Publish what was updated, what the next forward needs first going first."""
        publish(self._orders.forward, present, wait=wait)

    def wait_published(self) -> None:
        """Wait for every publication: masters may be changed and copies read afterwards."""
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.publication.wait()

    def _sync(self, intent: _Intent, unit: Unit | None = None, call: Call | None = None) -> list[int]:
        """Meet the other ranks until what was agreed is what this rank wants; serve their wishes until then."""
        while True:
            self._end_round()
            agreed = self._transport.agree_max(self._vector(intent, unit, call))
            if agreed[_FAILED]:
                self.stage = Stage.IDLE
                raise self._peer_failed()
            wants = [bool(agreed[kind]) for kind in _Intent]
            repeats_alone = wants[_Intent.REPEAT] and not any(wants[_Intent.BACKWARD :])
            if wants[_Intent.PASS] or repeats_alone:
                self._open_round()
                granted = intent in (_Intent.PASS, _Intent.REPEAT)
            elif wants[_Intent.REPEAT]:
                self._serve(agreed, unit)
                granted = intent is _Intent.REPEAT
            elif wants[_Intent.BACKWARD] or wants[_Intent.REDUCE]:
                self._open_half(gathers=wants[_Intent.BACKWARD], reduces=bool(agreed[_SYNCED]))
                granted = intent in (_Intent.BACKWARD, _Intent.REDUCE)
                if not granted:
                    self.end_half()
            else:
                granted = True
            if granted:
                return agreed

    def announce_failure(self, text: str) -> None:
        """Issue what the others wait for, and make each of them raise :class:`PeerFailed` at its next sync point."""
        if self.stage is Stage.BACKWARD:
            self.end_half()
        self._end_round()
        vector = [0] * (_HEADER + len(self.units) + len(self._presence))
        vector[_FAILED] = 1
        self._transport.agree_max(vector)
        self._transport.gather_texts(text)
        self.stage = Stage.IDLE

    def _peer_failed(self) -> PeerFailed:
        texts = self._transport.gather_texts("")
        failed = [f"rank {rank} raised {text}" for rank, text in enumerate(texts) if text]
        return PeerFailed(f"{'; '.join(failed)}; this rank stops with it", failed)

    def _vector(self, intent: _Intent, unit: Unit | None, call: Call | None) -> list[int]:
        header = [0] * _HEADER
        header[intent] = 1
        begins_half = intent in (_Intent.BACKWARD, _Intent.REDUCE)
        header[_SYNCED] = int(begins_half and (self.no_sync_depth == 0 or intent is _Intent.REDUCE))
        header[_CALL_MAX], header[_CALL_MIN] = (call, -call) if call is not None else (0, -len(Call) - 1)
        header[_HALVES_MAX], header[_HALVES_MIN] = self._halves, -self._halves
        requested = [0] * len(self.units)
        if unit is not None:
            requested[unit.index] = 1
        return [*header, *requested, *self._presence]

    def _open_round(self) -> None:
        self.stage = Stage.FORWARD
        self._forward_cursor = len(self.units) if self._held else 0
        self._held = not self._reshard

    def _open_half(self, *, gathers: bool, reduces: bool) -> None:
        self.stage = Stage.BACKWARD
        self._gathers = gathers and not self._held
        self._reduces = reduces
        self._gather_cursor = self._reduce_cursor = 0
        self._halves += int(reduces)

    def _serve(self, agreed: Sequence[int], wanted: Unit | None) -> None:
        """Gather just the units that some rank needs again, on all ranks and in order."""
        for unit in self.units:
            if agreed[_HEADER + unit.index]:
                unit.issue_gather("forward")
                if unit is not wanted:
                    self._free_unused(unit)
