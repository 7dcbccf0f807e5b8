"""For how long compute stood still because of communication, of any contestant: read from a profiler trace of steps.

Annotations ``step:<phase>`` surround a step's forward, backward and update on the host; no contestant has to say what
it waits for. Compute stood still for a collective where its stream has a gap, the host had launched what comes behind
the gap already, and a kernel of NCCL ended in it: exposed is the part of the gap, from that launch on, which such
kernels fill while nothing computes on any other stream, in the phase that launched what comes behind. A collective that
runs on beyond the gap was not what compute waited for, and a gap that is the host's fault counts for nothing.

Where collectives are annotated too, as :mod:`benchmarks._tracing` does with the runtime's, it is known what they were
for: publishing new weights to replicas, or the forward and backward themselves.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from benchmarks.traces import (
    Event,
    Interval,
    around_launches,
    compute_stream,
    correlation,
    intersection_us,
    interval,
    is_communication,
    launch_times,
    length_us,
    merged,
)

__all__ = [
    "BEHIND_COMPUTE",
    "NEWTON_SCHULZ",
    "PHASES",
    "STEP",
    "Exposed",
    "most_exposed",
    "read_exposed",
    "read_newton_schulz",
]

STEP = "step:"
PHASES = ("forward", "backward", "update")
NEWTON_SCHULZ = "newton-schulz"
BEHIND_COMPUTE = ("forward", "backward", "reduce")
"""Phases of the runtime's collectives of the forward and the backward pass: gathering for either, and reducing."""
CLOCK_US = 1.0
"""By which the begin of a kernel may be noted before the end of what it waited for."""
_BUSY = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Exposed:
    """Milliseconds of a step in which compute stood still, waiting for communication."""

    whole: float
    forward: float
    backward: float
    update: float
    """These three by when it stood still, whatever it waited for; they add up to the whole."""
    passes: float
    """Of the whole, for what the forward and the backward pass need and make: gathered weights and reduced gradients,
    the latter also where the update waits for them. Of collectives that say nothing: all of the two passes."""
    publish: float
    """Of the whole, for new weights on their way to replicas and for nothing of the passes; only ours says so."""
    communication: float
    """For how long any communication kernel ran, exposed or not."""


@dataclass(frozen=True, slots=True)
class _Collective:
    """A communication kernel; times in microseconds."""

    begin: float
    end: float
    launched: float
    what: str | None
    """The phase of the runtime's collective; None where nobody said."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a communication kernel during which compute stood still for it."""

    at: Interval
    when: str
    what: str | None

    @property
    def is_of_passes(self) -> bool:
        return self.when != "update" if self.what is None else self.what in BEHIND_COMPUTE


def read_exposed(trace: Mapping[str, Any]) -> Exposed:
    """Return what a step exposes: the mean of all steps of a Chrome trace but the first, of one rank on one GPU.

    The first is not read: what it waits for may have begun before the trace did.

    Raises:
        ValueError: the trace has no kernels (it was not taken on a GPU), or fewer than two annotated steps.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    busy = [event for event in events if event.get("cat") in _BUSY]
    phases = sorted((interval(event)[0], str(event["name"]).removeprefix(STEP)) for event in events if _is_phase(event))
    forwards = [begin for begin, phase in phases if phase == PHASES[0]]
    if not busy or len(forwards) < 2:
        raise ValueError(
            f"the trace needs kernels and two steps, found {len(busy)} kernels and {len(forwards)} ranges "
            f"{STEP}{PHASES[0]}: take it on a GPU, with ProfilerActivity.CPU and CUDA"
        )
    launched = launch_times(events)
    compute = compute_stream([event for event in busy if not is_communication(event)], launched)
    collectives = _collectives(events, [event for event in busy if is_communication(event)], launched)
    running = merged((each.begin, each.end) for each in collectives if each.launched >= forwards[1])
    anywhere = merged(interval(e) for e in busy if e["cat"] == "kernel" and not is_communication(e))
    return _summed(list(_pieces(compute, collectives, phases, forwards[1])), anywhere, running, len(forwards) - 1)


def read_newton_schulz(trace: Mapping[str, Any]) -> float | None:
    """Return milliseconds of a step in the ranges ``newton-schulz``, without communication; None where there are none.

    It is the mean of all steps; kernels that run at once count each.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    inside = around_launches(events, NEWTON_SCHULZ)
    num_steps = sum(_is_phase(event) and event["name"] == STEP + PHASES[0] for event in events)
    kernels = [event for event in events if event.get("cat") in _BUSY and correlation(event) in inside]
    spent = sum(float(event["dur"]) for event in kernels if not is_communication(event))
    return spent / 1e3 / num_steps if inside else None


def most_exposed(ranks: Sequence[Exposed]) -> Exposed:
    """Return each figure of the rank in which it is largest."""
    return Exposed(**{each.name: max(getattr(rank, each.name) for rank in ranks) for each in fields(Exposed)})


def _is_phase(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(STEP)


def _collectives(events: Sequence[Event], kernels: Sequence[Event], launched: Mapping[int, float]) -> list[_Collective]:
    """Return them by their ends; those whose launch is unknown began before the trace."""
    issued = around_launches(events)
    found = []
    for event in kernels:
        name = issued.get(correlation(event))
        what = None if name is None else name.partition("#")[0].rpartition("/")[2]
        found.append(_Collective(*interval(event), launched.get(correlation(event), -math.inf), what))
    return sorted(found, key=lambda each: each.end)


def _pieces(
    compute: Sequence[tuple[float, float, float]],
    collectives: Sequence[_Collective],
    phases: Sequence[tuple[float, str]],
    since: float,
) -> Iterator[_Piece]:
    """Yield what each gap of the compute stream owes to each collective that ended in it."""
    for (_, _, before), (launch, behind, _) in pairwise(compute):
        begin = max(before, launch)
        if launch < since or begin >= behind:
            continue
        when = phases[bisect.bisect_right(phases, launch, key=lambda each: each[0]) - 1][1]
        first = bisect.bisect_right(collectives, begin, key=lambda each: each.end)
        last = bisect.bisect_right(collectives, behind + CLOCK_US, key=lambda each: each.end)
        for each in collectives[first:last]:
            at = max(begin, each.begin), min(each.end, behind)
            if at[0] < at[1]:
                yield _Piece(at, when, each.what)


def _summed(
    pieces: Sequence[_Piece], anywhere: Sequence[Interval], running: Sequence[Interval], num_steps: int
) -> Exposed:
    """Sum the parts of pieces during which no kernel computed ``anywhere``, on no stream."""

    def exposed(chosen: Iterable[_Piece]) -> float:
        stood = merged(piece.at for piece in chosen)
        return (length_us(stood) - intersection_us(stood, anywhere)) / 1e3 / num_steps

    passes = [piece for piece in pieces if piece.is_of_passes]
    with_publish = [*passes, *(piece for piece in pieces if piece.what == "publish")]
    return Exposed(
        whole=exposed(pieces),
        **{phase: exposed(piece for piece in pieces if piece.when == phase) for phase in PHASES},
        passes=exposed(passes),
        publish=exposed(with_publish) - exposed(passes),
        communication=length_us(running) / 1e3 / num_steps,
    )
