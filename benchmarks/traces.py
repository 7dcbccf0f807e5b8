"""Overlap as a profiler trace shows it: kernels of collectives against kernels of compute, by route and phase.

The definition is that of trace analysis: the intervals of a route's communication kernels are merged, those of all
compute kernels are merged, and overlap is |communication ∩ compute| / |communication|. Routes overlap each other, so
their seconds do not add up to the total's. A route is known from the annotation around the call that launched a kernel.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["PREFIX", "TracedComm", "Window", "intersection_us", "length_us", "merged", "read_overlap"]

PREFIX = "dmuon:"
"""Annotations ``dmuon:<route>/<phase>`` surround the issue of a collective."""
Interval = tuple[float, float]
Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TracedComm:
    """Communication kernels of a route and phase. Seconds."""

    seconds: float
    """Of the merged intervals."""
    hidden_seconds: float
    """The part of it during which some compute kernel ran."""

    @property
    def exposed_seconds(self) -> float:
        """The part of it during which none ran."""
        return self.seconds - self.hidden_seconds

    @property
    def overlap_ratio(self) -> float | None:
        """Hidden over all; None without communication."""
        return self.hidden_seconds / self.seconds if self.seconds > 0 else None


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
    routes = _routes_by_correlation(events)
    compute = merged(_interval(event) for event in kernels if not _is_comm(event))
    by_key: dict[str, list[Interval]] = defaultdict(list)
    for event in kernels:
        if _is_comm(event):
            key = routes.get(event.get("args", {}).get("correlation", -1))
            by_key["total"].append(_interval(event))
            if key is not None:
                by_key[key].append(_interval(event))
    return {key: _comm(intervals, compute) for key, intervals in sorted(by_key.items())}


def _comm(intervals: Iterable[Interval], compute: Sequence[Interval]) -> TracedComm:
    own = merged(intervals)
    return TracedComm(length_us(own) / 1e6, intersection_us(own, compute) / 1e6)


def _is_comm(event: Mapping[str, Any]) -> bool:
    return str(event.get("name", "")).lower().startswith("nccl")


def _inside(event: Mapping[str, Any], window: Window | None) -> bool:
    return window is None or window[0] <= float(event["ts"]) < window[1]


def _interval(event: Mapping[str, Any]) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _routes_by_correlation(events: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the annotation in which a launch stood, by the correlation of the launch and its kernel."""
    ranges: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(PREFIX):
            ranges[event.get("tid")].append((*_interval(event), str(event["name"]).removeprefix(PREFIX)))
    for found in ranges.values():
        found.sort()
    routes = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            name = _around(ranges.get(event.get("tid"), []), float(event["ts"]))
            if name is not None:
                routes[int(event["args"]["correlation"])] = name
    return routes


def _around(ranges: Sequence[tuple[float, float, str]], moment: float) -> str | None:
    """Return the name of the range that holds ``moment``; ranges do not nest."""
    place = bisect.bisect_right(ranges, moment, key=lambda each: each[0]) - 1
    return ranges[place][2] if place >= 0 and moment <= ranges[place][1] else None
