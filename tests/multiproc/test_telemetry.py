"""Each figure moves the way its name says, and no other moves with it. One process group, time that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dmuon_runtime as dmuon
from dmuon_runtime.runtime import find_runtime
from dmuon_runtime.schedule import Schedule
from dmuon_runtime.spans import HostSpan
from dmuon_runtime.unit import Unit
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, assert_traffic, dedicate
from tests.multiproc.models import make
from tests.multiproc.reference import PolarNewtonSchulz
from tests.multiproc.test_equality import plain_backward
from tests.multiproc.virtual_time import Clock, virtual_time

pytestmark = pytest.mark.multiproc

STEPS = 3
SLOW_S = 50.0


class SlowNewtonSchulz(PolarNewtonSchulz):
    """Takes ``seconds`` of the clock for each call."""

    clock: Clock
    seconds: float = 0.0
    calls: int = 0

    def each_round(
        self, like: Sequence[Tensor], load: Callable[[Sequence[int]], list[Tensor]], steps: int = 5
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Yield what is right, late."""
        self.calls += 1
        self.clock.work(self.seconds)
        return super().each_round(like, load, steps)


def without_prefetch(schedule: Schedule) -> None:
    """Let ``schedule`` issue a unit's gather only when the unit itself is needed."""
    needs = {"need_forward": "_issue_forward", "need_backward": "_issue_backward"}
    for need, issue in needs.items():
        original_need, original_issue = getattr(schedule, need), getattr(schedule, issue)

        def asked(unit: Unit, need: object = original_need, issue: object = original_issue, name: str = issue) -> None:
            setattr(schedule, name, lambda stop: issue(stop - 1))  # type: ignore[operator]
            need(unit)  # type: ignore[operator]
            setattr(schedule, name, issue)

        setattr(schedule, need, asked)


def measure(
    wire_s: Mapping[tuple[str, str], float] | None = None, *, owner_s: float = 0.0, prefetch: bool = True
) -> tuple[dmuon.CountersSnapshot, int]:
    """Train a fresh model; return its counters and how often this rank called Newton-Schulz."""
    run: Run = dedicate(make(), Setting(steps=STEPS))
    runtime = find_runtime(run.model)
    if not prefetch:
        without_prefetch(runtime.schedule)
    with virtual_time(run.model, runtime.transport, wire_s or {}) as clock:
        slow = SlowNewtonSchulz()
        slow.clock, slow.seconds = clock, owner_s
        run.optimizer.newton_schulz = slow
        for step in range(STEPS):
            plain_backward(run.model, step, dist.get_rank())
            run.optimizer.step()
            run.optimizer.zero_grad()
        counted = runtime.counters.snapshot()
    assert counted.pending_spans == 0
    assert_traffic(run, STEPS)  # bytes are the plan's whatever the time does
    return counted, slow.calls


def overlap(counted: dmuon.CountersSnapshot, *phases: str) -> float:
    found = [part for (_, phase), part in counted.comm.items() if phase in phases]
    return 1 - sum(part.exposed_seconds for part in found) / sum(part.seconds for part in found)


def _figures() -> None:
    base, _ = measure()
    for key, part in base.comm.items():
        assert part.seconds == part.collectives, f"{key}: each of its collectives takes a second"
        assert 0 <= part.exposed_seconds <= part.seconds
    assert 0 < overlap(base, "forward", "backward") < 1
    assert base.owner_compute_seconds == 0, "nothing that owners do takes time here"
    _a_slow_wire(base)
    _a_slow_owner(base)
    _no_prefetch(base)
    _a_thread_keeps_its_state()


def _a_slow_wire(base: dmuon.CountersSnapshot) -> None:
    """Each route and phase in turn is slower than all compute: it is exposed by that, and nothing else is.

    Reductions are waited for at the step. Those that queue behind the slow one on its communicator can then be waited
    for themselves, each for its own second at most: none of the slow one's seconds is charged to them.
    """
    for slow in base.comm:
        counted, _ = measure({slow: SLOW_S})
        assert counted.comm[slow].seconds == SLOW_S * counted.comm[slow].collectives
        rise = counted.comm[slow].exposed_seconds - base.comm[slow].exposed_seconds
        assert rise > SLOW_S / 2, f"{slow} is waited for, and rose by {rise} s only"
        for key, part in counted.comm.items():
            if key != slow:
                assert part.seconds == base.comm[key].seconds, f"a slow {slow} lengthened {key}"
                queues = key[1] == slow[1] == "reduce"
                most = part.seconds if queues else base.comm[key].exposed_seconds
                assert part.exposed_seconds <= most, f"a slow {slow} exposed {key}"
            assert part.payload_bytes == base.comm[key].payload_bytes


def _a_slow_owner(base: dmuon.CountersSnapshot) -> None:
    """Rank 1 needs 3 s for each call of Newton-Schulz: its seconds rise by exactly that, rank 0's do not."""
    slow = dist.get_rank() == 1
    counted, calls = measure(owner_s=3.0 if slow else 0.0)
    assert calls > 0, "both ranks own matrices"
    assert counted.owner_compute_seconds == (3.0 * calls if slow else 0.0)
    exposed = {key: part.exposed_seconds for key, part in counted.comm.items()}
    assert exposed == {key: part.exposed_seconds for key, part in base.comm.items()}, "that is no communication"


def _no_prefetch(base: dmuon.CountersSnapshot) -> None:
    """Gathers that begin when they are needed hide nothing."""
    counted, _ = measure(prefetch=False)
    assert overlap(counted, "forward") < overlap(base, "forward")
    assert overlap(counted, "backward") < overlap(base, "backward")
    assert overlap(counted, "reduce") >= overlap(base, "reduce"), "a backward that waits more hides more reductions"


class Witness(HostSpan):
    """Notes, in each completion callback, whether its thread has been here before."""

    __slots__ = ()
    threads: ClassVar[set[int]] = set()
    new_states: ClassVar[list[int]] = []
    local: ClassVar[threading.local] = threading.local()

    def _ended(self, _future: object) -> None:
        super()._ended(_future)
        self.threads.add(threading.get_ident())
        if not hasattr(self.local, "was_here"):  # forgotten with the state of the thread
            self.local.was_here = True
            self.new_states.append(threading.get_ident())


def _a_thread_keeps_its_state() -> None:
    """A state that is made and freed at each callback costs three times what all the rest of telemetry does."""
    for _ in range(40):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        span = Witness()
        span.follow(work)
        span.wait(work)
    assert len(Witness.new_states) == len(Witness.threads) < 10


def test_every_figure_moves_the_way_its_name_says() -> None:
    run_ranks(2, _figures)
