"""Overlap as a profiler trace shows it, by route and phase, read in two ways.

*Without compute*, as trace analysis does: the intervals of a route's communication kernels are merged, those of all
compute kernels are merged, and overlap is |communication ∩ compute| / |communication|. A device that has nothing to
compute because the host is late, or because it serves another process, counts as exposed communication there.

*Stalled*: of a collective that compute waits for, the part that falls between the last kernel before the wait and the
first one behind it on the compute stream, and behind the moment at which the host told the stream to wait: up to then
the stream had nothing to do because the host was late. That is what the runtime counts as exposed, found without its
events.

Routes overlap each other, so their seconds do not add up to the total's. A route, and with ``#`` the collective, is
known from the annotation around the call that launched a kernel or waited for one.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "PREFIX",
    "WAIT",
    "Event",
    "Interval",
    "TracedComm",
    "Window",
    "around_launches",
    "compute_stream",
    "correlation",
    "intersection_us",
    "interval",
    "is_communication",
    "launch_times",
    "length_us",
    "merged",
    "read_overlap",
]

PREFIX = "dmuon:"
"""Annotations ``dmuon:<route>/<phase>#<number>`` surround the issue of a collective."""
WAIT = "dmuon-wait:"
"""Annotations ``dmuon-wait:<route>/<phase>#<number>`` surround the compute stream's wait for it."""
_LAUNCHES = ("cuda_runtime", "cuda_driver")
Event = Mapping[str, Any]
Interval = tuple[float, float]
Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TracedComm:
    """Communication kernels of a route and phase. Seconds."""

    seconds: float
    """Of the merged intervals."""
    hidden_seconds: float
    """The part of it during which some compute kernel ran."""
    stalled_seconds: float = 0.0
    """The part of it during which the compute stream stood still, waiting for it."""

    @property
    def exposed_seconds(self) -> float:
        """The part of it during which none ran."""
        return self.seconds - self.hidden_seconds

    @property
    def overlap_ratio(self) -> float | None:
        """Hidden over all; None without communication."""
        return self.hidden_seconds / self.seconds if self.seconds > 0 else None

    @property
    def unstalled_ratio(self) -> float | None:
        """What compute did not wait for over all; None without communication."""
        return 1 - self.stalled_seconds / self.seconds if self.seconds > 0 else None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same points."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length_us(intervals: Sequence[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def intersection_us(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the length of what two lists of disjoint ordered intervals share."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def read_overlap(trace: Mapping[str, Any], window: Window | None = None) -> dict[str, TracedComm]:
    """Return the communication of each ``route/phase`` of a Chrome trace, of all of them under ``total``.

    Args:
        trace: what ``torch.profiler`` exports, of one rank on one GPU.
        window: begin and end in the trace's microseconds; kernels that begin outside it are left out.

    Raises:
        ValueError: the trace has no kernels: it was not taken on a GPU, or without CUDA activity.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel" and _inside(event, window)]
    if not kernels:
        raise ValueError("the trace has no kernel events: take it on a GPU with ProfilerActivity.CUDA")
    issued = around_launches(events)
    compute = merged(interval(event) for event in kernels if not is_communication(event))
    collectives: dict[str, list[Interval]] = defaultdict(list)
    unknown: list[Interval] = []
    for event in kernels:
        if is_communication(event):
            name = issued.get(correlation(event))
            (unknown if name is None else collectives[name]).append(interval(event))
    stalls = _stalls(events, [event for event in kernels if not is_communication(event)])
    by_key: dict[str, list[str]] = defaultdict(list)
    for name in collectives:
        by_key[name.partition("#")[0]].append(name)
    by_key["total"] = list(collectives)
    found = {}
    for key, names in sorted(by_key.items()):
        own = merged(part for name in names for part in collectives[name])
        own = merged([*own, *unknown]) if key == "total" else own
        stalled = merged(part for name in names for part in _shared(collectives[name], stalls.get(name, [])))
        seconds = (length_us(own), intersection_us(own, compute), length_us(stalled))
        found[key] = TracedComm(*(each / 1e6 for each in seconds))
    return found


def launch_times(events: Iterable[Event]) -> dict[int, float]:
    """Return when the host launched what, by the correlation of the launch and its kernels."""
    return {
        int(event["args"]["correlation"]): float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }


def compute_stream(compute: Sequence[Event], launched: Mapping[int, float]) -> list[tuple[float, float, float]]:
    """Return (launch, begin, end) of what ran on the compute stream, in its order, where the launch is known.

    The compute stream is the one whose kernels take longest. Kernels of a stream run in the order of their launches.
    """
    busy: dict[object, float] = defaultdict(float)
    for event in compute:
        busy[event["args"]["stream"]] += float(event["dur"])
    stream = max(busy, key=lambda each: busy[each], default=None)
    return sorted(
        (launched[correlation(event)], *interval(event))
        for event in compute
        if event["args"]["stream"] == stream and correlation(event) in launched
    )


def _stalls(events: Sequence[Event], compute: Sequence[Event]) -> dict[str, list[Interval]]:
    """Return when the compute stream stood between two kernels with a wait between their launches, by collective; not
    before the host had come to the wait."""
    ordered = compute_stream(compute, launch_times(events))
    found: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(WAIT):
            told, left = interval(event)
            behind = bisect.bisect_left(ordered, left, key=lambda each: each[0])
            if 0 < behind < len(ordered):
                stall = max(ordered[behind - 1][2], told), ordered[behind][1]
                if stall[0] < stall[1]:
                    found[str(event["name"]).removeprefix(WAIT)].append(stall)
    return found


def _shared(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return the intervals that both have in common."""
    pairs = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(begin, end) for begin, end in pairs if begin < end]


def is_communication(event: Event) -> bool:
    """Tell whether it is one of NCCL's kernels: ncclDevKernel_…, older ncclKernel_…, newer ncclSymDevKernel_….

    With one rank NCCL copies instead, and a copy is no communication.
    """
    return str(event.get("name", "")).lower().startswith("nccl")


def _inside(event: Event, window: Window | None) -> bool:
    return window is None or window[0] <= float(event["ts"]) < window[1]


def interval(event: Event) -> Interval:
    """Return begin and end in microseconds."""
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def correlation(event: Event) -> int:
    """Return the number that a kernel shares with its launch; -1 where there is none."""
    return int(event.get("args", {}).get("correlation", -1))


def around_launches(events: Sequence[Event], prefix: str = PREFIX) -> dict[int, str]:
    """Return the annotation, less its ``prefix``, in which a launch stood, by the correlation of launch and kernel."""
    ranges: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(prefix):
            ranges[event.get("tid")].append((*interval(event), str(event["name"]).removeprefix(prefix)))
    for found in ranges.values():
        found.sort()
    routes = {}
    for event in events:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            name = _around(ranges.get(event.get("tid"), []), float(event["ts"]))
            if name is not None:
                routes[correlation(event)] = name
    return routes


def _around(ranges: Sequence[tuple[float, float, str]], moment: float) -> str | None:
    """Return the name of the range that holds ``moment``; ranges do not nest."""
    place = bisect.bisect_right(ranges, moment, key=lambda each: each[0]) - 1
    return ranges[place][2] if place >= 0 and moment <= ranges[place][1] else None
