"""A rank's part in swapping the kernel of a running job: prepare beside the steps, change with all, prove or go back.

Every decision is taken from what all ranks heard at the beginning of the same step, so all take it at once. Nobody
leads: rank 0 only passes the order on and keeps the time.

1. *Prepare.* A thread builds what was asked for and compares it with a reference. Steps go on with what there was.
2. *Change.* At the first step at whose beginning all ranks are known to be ready, all change. One refusal, or the
   deadline, and none does.
3. *Prove.* After that step each rank compares its ledger with what was asked for. All say yes: the swap is committed.
   One says no: at the next agreed step all go back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from worker.contract.kernels import SwapOrder

__all__ = ["Prepare", "Swap", "SwapEvent", "SwapPhase"]

_RANKS = 1 << 20
"""A number and a rank share one word: number * _RANKS + rank + 1. The greatest names one of the ranks."""


class SwapPhase(StrEnum):
    """Where a rank is with a swap."""

    IDLE = "idle"
    """There is none; the present kernel runs."""
    PREPARING = "preparing"
    """A thread prepares; the old kernel runs."""
    READY = "ready"
    """What was prepared is held; the old kernel runs."""
    REFUSED = "refused"
    """This rank cannot; the old kernel runs until all have heard."""
    TRIED = "tried"
    """The new kernel runs; the old one is held until all ranks have proved what they launched."""


class SwapEvent(StrEnum):
    """What a rank is to do at the beginning of a step."""

    BEGUN = "begun"
    CHANGE = "change"
    """Run what was prepared from this step on."""
    COMMITTED = "committed"
    """Let go of the old one."""
    ABANDONED = "abandoned"
    """Nothing had changed, and nothing does."""
    BACK = "back"
    """Run the old one from this step on."""


Prepare = Callable[[SwapOrder], str | None]
"""Gets ready for an order, in a thread; returns why it cannot, or None. What it raises is a reason too."""


@dataclass(slots=True)
class _Preparation:
    """One run of the thread; its result is read once :attr:`done` is set."""

    done: threading.Event
    refusal: str | None = None


class Swap:
    """State of the swaps of one rank, one at a time. ``clock`` is read on rank 0 alone."""

    def __init__(self, rank: int, prepare: Prepare, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._prepare, self._clock = rank, prepare, clock
        self.phase = SwapPhase.IDLE
        self.order: SwapOrder | None = None
        self.reason = ""
        """Why this rank refused, or what it launched instead; of an event, why all go back."""
        self._number = 0
        self._running: _Preparation | None = None
        self._deadline = 0.0
        self._proved = self._disproved = False

    def voice(self) -> list[int]:
        """Return the five words of this rank: ready (negative), refused, late, proved (negative), disproved.

        Of negative words the greatest is the number for which *every* rank has got so far.
        """
        self._settle()
        mine = self._number * _RANKS + self._rank + 1
        before = self._number - 1
        is_ready = self.phase in (SwapPhase.READY, SwapPhase.TRIED, SwapPhase.IDLE)
        is_late = self.phase in (SwapPhase.PREPARING, SwapPhase.READY) and self._clock() >= self._deadline
        return [
            -(self._number if is_ready else before),
            mine if self.phase is SwapPhase.REFUSED else 0,
            self._number if is_late and self._rank == 0 else 0,
            -(self._number if self._proved or self.phase is SwapPhase.IDLE else before),
            mine if self._disproved else 0,
        ]

    def begin(self, order: SwapOrder | None, heard: Sequence[int]) -> SwapEvent | None:
        """Return what follows for the step that begins from the words of all ranks."""
        ready, refused, late, proved, disproved = heard
        if self.phase is SwapPhase.IDLE:
            if order is None or order.number <= self._number:
                return None
            self._start(order)
            return SwapEvent.BEGUN
        if self.phase is SwapPhase.TRIED:
            if disproved // _RANKS == self._number:
                return self._end(SwapEvent.BACK, f"rank {disproved % _RANKS - 1} launched something else")
            return self._end(SwapEvent.COMMITTED, "") if -proved >= self._number else None
        if refused // _RANKS == self._number:
            return self._end(SwapEvent.ABANDONED, f"rank {refused % _RANKS - 1} refused")
        if -ready >= self._number:
            self.phase = SwapPhase.TRIED
            return SwapEvent.CHANGE
        if late == self._number:
            assert self.order is not None, "a swap is under way"
            return self._end(SwapEvent.ABANDONED, f"not all ranks were ready within {self.order.deadline_s:g} s")
        return None

    def prove(self, difference: str | None) -> None:
        """Say what this rank launched in a step after the change: as was asked for (None), or something else."""
        if self.phase is SwapPhase.TRIED and not self._proved and not self._disproved:
            self._proved, self._disproved = difference is None, difference is not None
            self.reason = difference or ""

    @property
    def needs_proof(self) -> bool:
        """True from the change until this rank has said what it launched."""
        return self.phase is SwapPhase.TRIED and not self._proved and not self._disproved

    def take_refusal(self) -> str | None:
        """Return why this rank refuses, once."""
        self._settle()
        if self.phase is not SwapPhase.REFUSED or not self.reason:
            return None
        reason, self.reason = self.reason, ""
        return reason

    def _start(self, order: SwapOrder) -> None:
        self.order, self._number, self.reason = order, order.number, ""
        self._proved = self._disproved = False
        self._deadline = self._clock() + order.deadline_s
        if self._running is not None and not self._running.done.is_set():
            self.phase, self.reason = SwapPhase.REFUSED, "the preparation of an earlier swap still runs"
            return
        self.phase = SwapPhase.PREPARING
        self._running = running = _Preparation(threading.Event())
        threading.Thread(target=self._run, args=(order, running), name="swap", daemon=True).start()

    def _run(self, order: SwapOrder, running: _Preparation) -> None:
        try:
            running.refusal = self._prepare(order)
        except Exception as error:  # whatever it is, this rank cannot, and training goes on
            running.refusal = f"{type(error).__name__}: {error}"
        finally:
            running.done.set()

    def _settle(self) -> None:
        if self.phase is SwapPhase.PREPARING and self._running is not None and self._running.done.is_set():
            refusal = self._running.refusal
            self.phase = SwapPhase.READY if refusal is None else SwapPhase.REFUSED
            self.reason = refusal or ""

    def _end(self, event: SwapEvent, reason: str) -> SwapEvent:
        self.phase, self.reason = SwapPhase.IDLE, reason
        self._proved = self._disproved = False
        return event
