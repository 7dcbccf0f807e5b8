"""The protocol of a swap by itself: ranks that hear the same maxima do the same at the same step, and all get done."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from worker.contract.kernels import Kernel, KernelTarget, SwapOrder
from worker.swap import Swap, SwapEvent, SwapPhase


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def order(number: int, deadline_s: float = 10.0) -> SwapOrder:
    return SwapOrder(number=number, target=KernelTarget(kernel=Kernel.BLOCKED), deadline_s=deadline_s)


class Gang:
    """Ranks whose words of one step are heard, as their maxima, at the beginning of the next but one."""

    def __init__(self, prepares: list[Callable[[SwapOrder], str | None]], clock: Clock) -> None:
        self.ranks = [Swap(rank, prepare, clock) for rank, prepare in enumerate(prepares)]
        self.heard = self._maxima()

    def _maxima(self) -> list[int]:
        return [max(words) for words in zip(*(rank.voice() for rank in self.ranks), strict=True)]

    def step(self, wanted: SwapOrder | None, launched: dict[int, str] | None = None) -> SwapEvent | None:
        """Do one step; ``launched`` says by rank what was launched instead of what was asked for."""
        heard, self.heard = self.heard, self._maxima()  # announced before the step is obeyed
        events = {rank.begin(wanted, heard) for rank in self.ranks}
        assert len(events) == 1, "all ranks do the same"
        for number, rank in enumerate(self.ranks):
            rank.prove((launched or {}).get(number))
        return events.pop()

    def settle(self) -> None:
        """Wait until no preparation runs that can end."""
        deadline = time.monotonic() + 5
        while any(t.name == "swap" and t.is_alive() for t in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.001)


def ready(_: SwapOrder) -> str | None:
    return None


def test_all_ready_change_once_and_commit() -> None:
    gang = Gang([ready] * 3, Clock())
    events = [gang.step(order(4))]
    gang.settle()
    events += [gang.step(order(4)) for _ in range(8)]
    assert [event for event in events if event] == [SwapEvent.BEGUN, SwapEvent.CHANGE, SwapEvent.COMMITTED]
    assert events.index(SwapEvent.COMMITTED) - events.index(SwapEvent.CHANGE) == 2, "proved after the step, heard after"


def test_one_refusal_and_nobody_changes() -> None:
    gang = Gang([ready, lambda _: "no such GPU", ready], Clock())
    events = [gang.step(order(1))]
    gang.settle()
    events += [gang.step(order(1)) for _ in range(6)]
    assert [event for event in events if event] == [SwapEvent.BEGUN, SwapEvent.ABANDONED]
    assert gang.ranks[0].reason == gang.ranks[2].reason == "rank 1 refused"


def test_what_preparing_raises_is_a_refusal_with_its_text() -> None:
    def broken(_: SwapOrder) -> str | None:
        raise ImportError("no module named quack")

    gang = Gang([broken], Clock())
    gang.step(order(1))
    gang.settle()
    assert gang.ranks[0].take_refusal() == "ImportError: no module named quack"
    assert gang.ranks[0].take_refusal() is None, "told once"


def test_a_rank_that_launches_something_else_takes_all_back() -> None:
    gang = Gang([ready] * 2, Clock())
    gang.step(order(1))
    gang.settle()
    events = [gang.step(order(1), launched={1: "cublas gram"}) for _ in range(6)]
    assert [event for event in events if event] == [SwapEvent.CHANGE, SwapEvent.BACK]
    assert gang.ranks[0].reason == "rank 1 launched something else"


def test_a_late_rank_holds_nobody_up_and_refuses_until_its_thread_has_ended() -> None:
    clock, free = Clock(), threading.Event()

    def stuck(_: SwapOrder) -> str | None:
        free.wait(10)
        return None

    gang = Gang([ready, stuck], clock)
    events = [gang.step(order(1)) for _ in range(5)]
    clock.now = 10.0
    events += [gang.step(order(1)) for _ in range(4)]
    assert [event for event in events if event] == [SwapEvent.BEGUN, SwapEvent.ABANDONED]
    events = [gang.step(order(2)) for _ in range(6)]
    assert [event for event in events if event] == [SwapEvent.BEGUN, SwapEvent.ABANDONED]
    free.set()
    gang.settle()
    gang.step(order(3))
    gang.settle()
    events = [gang.step(order(3)) for _ in range(6)]
    assert [event for event in events if event] == [SwapEvent.CHANGE, SwapEvent.COMMITTED]


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_never_part_the_ranks(seed: int) -> None:
    """Whatever ranks answer and launch, and in whatever order preparations end: all do the same, and all get done."""
    dice, clock = random.Random(seed), Clock()
    gates: list[threading.Event] = []

    def some(_: SwapOrder) -> str | None:
        gate = threading.Event()
        gates.append(gate)
        gate.wait(10)
        return dice.choice((None, None, None, "cannot"))

    gang, ends = Gang([some] * 3, clock), 0
    for number in range(1, 12):
        for _ in range(40):
            clock.now += dice.random()
            if gates and dice.random() < 0.5:
                gates.pop(dice.randrange(len(gates))).set()
            wrong = {dice.randrange(3): "cublas"} if dice.random() < 0.1 else None
            event = gang.step(order(number, deadline_s=8.0), wrong)
            ends += event in (SwapEvent.COMMITTED, SwapEvent.ABANDONED, SwapEvent.BACK)
        assert {rank.phase for rank in gang.ranks} == {SwapPhase.IDLE}, "40 steps of half a second are enough"
    assert ends == 11, "each order has one end"
    for gate in gates:
        gate.set()
