"""The breaker of a kernel: six states, what is seen of calls, and the moves between states. Pure: no torch, no clock.

A breaker guards one kernel for one size class and dtype. It *wishes* for a move, from what it has observed and the time
that it is told; it moves only when it is told to. A process alone grants its own wishes; ranks that must launch the
same kernels merge theirs first and then all make the same move at the same step.

Everything is finite: an open breaker is tried again after ``open_s`` (doubled at each failure in a row, up to
``max_open_s``), and a trial ends after ``half_open_calls`` good calls, one bad call, or ``half_open_s``.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Final

__all__ = [
    "Breaker", "BreakerKey", "BreakerState", "Cause", "Finding", "Move", "Observation", "Thresholds", "Transition",
    "decide_finding", "size_class",
]  # fmt: skip


class BreakerState(StrEnum):
    """What runs in place of a kernel."""

    CLOSED = "closed"
    """The kernel runs where it was chosen; its calls are watched."""
    OPEN = "open"
    """It tripped by itself: the fallback runs."""
    HALF_OPEN = "half_open"
    """The fallback runs, and the kernel beside it on a few matrices, for comparison alone."""
    FORCED_OPEN = "forced_open"
    """An operator pinned the fallback; nothing is tried."""
    DISABLED = "disabled"
    """An operator pinned the kernel: nothing is compared and nothing trips."""
    METRICS_ONLY = "metrics_only"
    """The kernel runs; failures are counted and nothing trips."""

    @property
    def avoids_kernel(self) -> bool:
        """True where the fallback's result is applied."""
        return self in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.FORCED_OPEN)


class Cause(IntEnum):
    """Why a breaker trips. Of several causes at once, on one rank or on many, the highest is told."""

    PROBE_TIMEOUT = 1
    SLOW = 2
    ORTHOGONALITY_ERROR = 3
    RELATIVE_ERROR = 4
    NON_FINITE = 5
    EXCEPTION = 6


class Move(StrEnum):
    """What can be done to a breaker; the first three it wishes for itself, the others are an operator's."""

    TRIP = "trip"
    PROBE = "probe"
    CLOSE = "close"
    FORCE_OPEN = "force_open"
    DISABLE = "disable"
    OBSERVE = "observe"
    RESET = "reset"


_S = BreakerState
_MOVES: Final[dict[Move, tuple[frozenset[BreakerState], BreakerState]]] = {
    Move.TRIP: (frozenset({_S.CLOSED, _S.HALF_OPEN}), _S.OPEN),
    Move.PROBE: (frozenset({_S.OPEN}), _S.HALF_OPEN),
    Move.CLOSE: (frozenset({_S.HALF_OPEN}), _S.CLOSED),
    Move.FORCE_OPEN: (frozenset(_S), _S.FORCED_OPEN),
    Move.DISABLE: (frozenset(_S), _S.DISABLED),
    Move.OBSERVE: (frozenset(_S), _S.METRICS_ONLY),
    Move.RESET: (frozenset(_S), _S.CLOSED),
}
"""Where each move may begin, and where it leads."""


HALF_FACTOR: Final = 5.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a breaker trips, and how long it waits.

    Raises:
        ValueError: naming every value that is out of its range.
    """

    relative_error: float = 0.05
    """Largest difference from the fallback's result, weighted (:func:`~dmuon_runtime.guard.compare`), in 32 bits;
    five times as much in 16, see :meth:`of_dtype`."""
    orthogonality_error: float = 0.1
    """Largest excess of the root mean square of ``sigma^2 - 1`` over the fallback's."""
    slow_factor: float = 3.0
    """A compared call is slow when it takes more than this many times the fallback's time on the same matrices."""
    slow_rate: float = 0.5
    """Share of slow calls in the window that trips."""
    window: int = 10
    """Compared calls that the rate is taken over."""
    minimum_calls: int = 5
    """Compared calls before the rate counts."""
    check_every_calls: int = 200
    """Calls from one comparison of a shape to the next while closed; the first call is compared."""
    check_matrices: int = 1
    """Matrices of each shape in a comparison; those of a shape take turns."""
    open_s: float = 60.0
    max_open_s: float = 3600.0
    half_open_calls: int = 5
    half_open_s: float = 120.0

    def __post_init__(self) -> None:
        counts = ("window", "minimum_calls", "check_every_calls", "check_matrices", "half_open_calls")
        lowest = {"relative_error": 0.0, "orthogonality_error": 0.0, "slow_factor": 1.0, "open_s": 0.0}
        lowest |= {"slow_rate": 0.0, "max_open_s": self.open_s, "half_open_s": 0.0} | dict.fromkeys(counts, 1)
        bad = [f"{name} is {getattr(self, name)}, at least {low:g} is needed" for name, low in lowest.items()
               if not low <= getattr(self, name) < math.inf]  # fmt: skip
        if self.slow_rate > 1 or self.minimum_calls > self.window:
            bad.append(f"slow_rate {self.slow_rate} may be 1 at most, minimum_calls {self.minimum_calls} the window")
        if bad:
            raise ValueError(f"breaker thresholds: {'; '.join(bad)}")

    def of_dtype(self, dtype: str) -> Thresholds:
        """Return the thresholds of an iteration in ``dtype``.

        In 16 bits two correct kernels differ by up to 0.2 on a matrix of rank one, where every rounding falls on its
        one direction, and by 0.03 on one of full rank.
        """
        if dtype not in ("float16", "bfloat16"):
            return self
        return replace(self, relative_error=HALF_FACTOR * self.relative_error)


@dataclass(frozen=True, order=True, slots=True)
class BreakerKey:
    """What one breaker guards."""

    kernel: str
    size_class: int
    """Short sides up to this power of two, and above its half; see :func:`size_class`."""
    dtype: str
    """Of the iteration, such as ``float16``."""


def size_class(short_dim: int) -> int:
    """Return the power of two that is not below ``short_dim``."""
    return 1 << max(0, short_dim - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of one call; None where it was not looked at."""

    exception: str | None = None
    non_finite: bool = False
    """A finite matrix gave NaN or infinity."""
    relative_error: float | None = None
    orthogonality_excess: float | None = None
    slow: bool | None = None
    compared: bool = False
    """True for a call beside the fallback: in a trial these count."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a breaker should trip."""

    cause: Cause
    detail: str


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state."""

    key: BreakerKey
    before: BreakerState
    after: BreakerState
    reason: str


def decide_finding(thresholds: Thresholds, seen: Observation) -> Finding | None:
    """Return what is wrong with one call by itself; a slow call alone is not. NaN is beyond every threshold."""
    if seen.exception is not None:
        return Finding(Cause.EXCEPTION, seen.exception)
    if seen.non_finite:
        return Finding(Cause.NON_FINITE, "finite matrices gave NaN or infinity")
    for cause, value, limit in (
        (Cause.RELATIVE_ERROR, seen.relative_error, thresholds.relative_error),
        (Cause.ORTHOGONALITY_ERROR, seen.orthogonality_excess, thresholds.orthogonality_error),
    ):
        if value is not None and not value <= limit:
            return Finding(cause, f"{cause.name.lower()} {value:.3g} is above {limit:g}")
    return None


class Breaker:
    """One breaker; see the module. Times are seconds of whatever clock the caller has."""

    def __init__(self, key: BreakerKey, thresholds: Thresholds, state: BreakerState = BreakerState.CLOSED) -> None:
        self.key, self.thresholds, self.state = key, thresholds, state
        self.calls = 0
        """Calls seen in any state, compared or not."""
        self.failures: dict[Cause, int] = {}
        self.probes = 0
        """Good compared calls of the trial in progress."""
        self._since = 0.0
        self._openings = 0
        self._found: Finding | None = None
        self._slow: deque[bool] = deque(maxlen=thresholds.window)

    @property
    def is_watched(self) -> bool:
        """True when the kernel's results are applied, and every so often compared with the fallback's."""
        return self.state in (BreakerState.CLOSED, BreakerState.METRICS_ONLY)

    @property
    def tries_next(self) -> bool:
        """True when the next call is one of a trial: the kernel runs beside the fallback."""
        is_trial = self.state is BreakerState.HALF_OPEN
        return is_trial and self._found is None and self.probes < self.thresholds.half_open_calls

    @property
    def is_suspect(self) -> bool:
        """True when a call gave a wrong result or none, and the breaker has not opened yet."""
        return self.state is BreakerState.CLOSED and self._found is not None and self._found.cause > Cause.SLOW

    @property
    def open_for_s(self) -> float:
        """How long the present opening lasts before it is tried again."""
        doubled = self.thresholds.open_s * 2.0 ** min(60, max(0, self._openings - 1))
        return min(self.thresholds.max_open_s, doubled)

    def observe(self, seen: Observation) -> Finding | None:
        """Take in one call; return what is wrong with it, whatever the state makes of that."""
        self.calls += 1
        finding = decide_finding(self.thresholds, seen)
        if seen.slow is not None:
            self._slow.append(seen.slow)
            finding = finding or self._slow_rate()
        if finding is not None:
            self.failures[finding.cause] = self.failures.get(finding.cause, 0) + 1
            if self._found is None or finding.cause > self._found.cause:
                self._found = finding
        elif seen.compared and self.state is BreakerState.HALF_OPEN:
            self.probes += 1
        return finding

    def _slow_rate(self) -> Finding | None:
        slow, number = sum(self._slow), len(self._slow)
        if number < self.thresholds.minimum_calls or slow < self.thresholds.slow_rate * number:
            return None
        factor = self.thresholds.slow_factor
        return Finding(Cause.SLOW, f"{slow} of {number} calls took over {factor:g} times the fallback's time")

    def wish(self, now: float) -> tuple[Move, Finding | None] | None:
        """Return the move that is due by what was seen and by the time, if any."""
        if self.state in (BreakerState.CLOSED, BreakerState.HALF_OPEN) and self._found is not None:
            return Move.TRIP, self._found
        waited = now - self._since
        if self.state is BreakerState.OPEN and waited >= self.open_for_s:
            return Move.PROBE, None
        if self.state is BreakerState.HALF_OPEN:
            if self.probes >= self.thresholds.half_open_calls:
                return Move.CLOSE, None
            if waited >= self.thresholds.half_open_s:
                done = f"{self.probes} of {self.thresholds.half_open_calls} trial calls in {waited:.0f} s"
                return Move.TRIP, Finding(Cause.PROBE_TIMEOUT, done)
        return None

    def move(self, move: Move, now: float, reason: str) -> Transition | None:
        """Make a move; None, and nothing changes, where it does not lead away from the present state."""
        begins, after = _MOVES[move]
        if self.state not in begins or (self.state is after and move is not Move.RESET):
            return None
        before, self.state, self._since = self.state, after, now
        if move is Move.TRIP:
            self._openings += 1
        elif move is not Move.PROBE:
            self._openings = 0
        self._found, self.probes = None, 0
        self._slow.clear()
        return None if before is after else Transition(self.key, before, after, reason)
