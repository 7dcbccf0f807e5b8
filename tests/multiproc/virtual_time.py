"""Time that moves only when a test moves it, under real collectives: figures of waiting become exact.

Compute advances the clock by what a module is said to take; a collective takes what its wire is said to take, one at a
time in each lane. A wait for it moves the clock to its end. The real gloo collective runs underneath.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from dmuon_runtime import spans
from dmuon_runtime.process_groups import Axis
from dmuon_runtime.spans import Work
from dmuon_runtime.transport import Handle, Transport

__all__ = ["Clock", "virtual_time"]

Key = tuple[str, str]


@dataclass
class Clock:
    """Seconds since the beginning, and what is to happen later."""

    now: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def perf_counter(self) -> float:
        """Stand in for :func:`time.perf_counter`."""
        return self.now

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Let ``event`` happen when the clock passes ``moment``."""
        heapq.heappush(self._events, (moment, next(self._order), event))

    def advance_to(self, moment: float) -> None:
        """Move on; what is due happens in order, each at its own moment."""
        while self._events and self._events[0][0] <= moment:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, moment)

    def work(self, seconds: float) -> None:
        """Let compute take ``seconds``."""
        self.advance_to(self.now + seconds)


class _Wired:
    """A collective that takes its time on the wire; also its own future."""

    def __init__(self, real: Work, clock: Clock, done_at: float) -> None:
        self._real, self._clock, self._done_at = real, clock, done_at
        self._done = False
        self._callbacks: list[Callable[[object], None]] = []
        clock.at(done_at, self._end)

    def _end(self) -> None:
        self._real.wait()
        self._done = True
        for callback in self._callbacks:
            callback(self)

    def wait(self) -> bool:
        self._clock.advance_to(self._done_at)
        return True

    def is_completed(self) -> bool:
        return self._done

    def get_future(self) -> _Wired:
        return self

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        assert not self._done, "a callback is set when the work is issued"
        self._callbacks.append(callback)


@contextmanager
def virtual_time(model: nn.Module, transport: Transport, wire_s: Mapping[Key, float]) -> Iterator[Clock]:
    """Put ``model``'s units and the wires of ``transport`` on a clock of their own.

    Args:
        model: dedicated; each of its units takes 1 s forward and, but for the embedding, 2 s backward.
        transport: its transport.
        wire_s: seconds of a collective by (route, phase); 1 s for those that it leaves out.
    """
    clock, issue_really, free_at = Clock(), transport._issue, dict[tuple[str, str], float]()

    def issue(work: Callable[[], object], axis: Axis, lane: str, key: Key | None, keep: tuple[Tensor, ...]) -> Handle:
        def wired() -> object:
            begin = max(clock.now, free_at.get((axis.name, lane), 0.0))
            free_at[axis.name, lane] = end = begin + (0.0 if key is None else wire_s.get(key, 1.0))
            return _Wired(work(), clock, end)  # type: ignore[arg-type]

        return issue_really(wired, axis, lane, key, keep)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "time", SimpleNamespace(perf_counter=clock.perf_counter))
        patch.setattr(transport, "_issue", issue)
        hooks = [unit.register_forward_hook(lambda *_: clock.work(1.0)) for unit in _boundaries(model)]
        backward = [unit for unit in _boundaries(model) if not isinstance(unit, nn.Embedding)]  # its input has none
        hooks += [unit.register_full_backward_pre_hook(lambda *_: clock.work(2.0)) for unit in backward]
        yield clock
        for hook in hooks:
            hook.remove()


def _boundaries(model: nn.Module) -> list[nn.Module]:
    layers = model.get_submodule("layers")
    return [*layers.children(), *(child for child in model.children() if child is not layers)]
