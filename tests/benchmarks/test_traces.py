"""The analysis of profiler traces, on a stored trace small enough to work out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dmuon_runtime as dmuon
from benchmarks.trace_overlap import apart, compare
from benchmarks.traces import TracedComm, intersection_us, merged, read_overlap
from tests.benchmarks.trace_events import kernel, launch, span

TRACE = json.loads((Path(__file__).parent / "overlap_trace.json").read_text())


def test_overlap_by_route_and_phase() -> None:
    """Compute runs from 120 to 190 µs: two kernels on two streams that overlap each other count once."""
    found = read_overlap(TRACE)
    assert found["muon/forward"] == TracedComm(pytest.approx(100e-6), pytest.approx(70e-6))
    assert found["muon/forward"].overlap_ratio == pytest.approx(0.7)
    assert found["adamw/forward"].overlap_ratio == 0, "a copy between 210 and 220 µs is no compute"
    assert found["muon/reduce"].overlap_ratio == pytest.approx(40 / 80)


def test_the_total_is_the_union_and_no_sum() -> None:
    found = read_overlap(TRACE)
    assert found["total"].seconds == pytest.approx(150e-6), "100 to 250 µs, though the routes' kernels take 230"
    assert found["total"].seconds <= sum(part.seconds for key, part in found.items() if key != "total")
    assert found["total"].exposed_seconds == pytest.approx(80e-6)


def test_a_window_and_a_trace_without_kernels() -> None:
    assert set(read_overlap(TRACE, (199.0, 300.0))) == {"adamw/forward", "total"}
    with pytest.raises(ValueError, match="no kernel events"):
        read_overlap({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}]})


def test_intervals() -> None:
    assert merged([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert intersection_us([(0, 4), (5, 7)], [(1, 2), (3, 6)]) == 1 + 1 + 1
    assert intersection_us([], [(0, 1)]) == 0


def test_rows_put_both_side_by_side() -> None:
    none = dmuon.CountersSnapshot({}, dmuon.CommCount(), 0.0, 0, 0)
    after = dmuon.CountersSnapshot(
        {("muon", "forward"): dmuon.CommCount(2, 0.1, 0.02, 10), ("muon", "publish"): dmuon.CommCount(1, 0.0, 0.0, 1)},
        dmuon.CommCount(), 0.0, 0, 0,
    )  # fmt: skip
    rows = compare({"muon/forward": TracedComm(0.1, 0.05, 0.021)}, none, after)
    assert [row["route"] for row in rows] == ["muon/forward", "muon/publish"]
    assert rows[0]["difference"] == pytest.approx(0.01), "what compute waited for, not what ran without it"
    assert rows[1]["difference"] is None and rows[1]["traced ms"] is None, "what one of them did not see is not equal"
    assert apart(rows) == [], "nothing was published for a hundredth of the time: it is not judged"
    rows = compare({"muon/forward": TracedComm(0.1, 0.05, 0.026)}, none, after)
    assert apart(rows) == ["muon/forward"]
    assert apart(compare({}, none, after)) == ["muon/forward"], "what the trace did not see does not agree"


def test_a_stall_is_what_compute_waited_for() -> None:
    """Between 140 and 150 µs the device has nothing to do and nobody waits; between 170 and 200 compute waits."""
    events = [
        span("dmuon:muon/forward#0", 0, 10), launch(1, 5), kernel("ncclA", 20, 1, 100, 200),
        span("dmuon:muon/forward#1", 10, 20), launch(2, 15), kernel("ncclB", 20, 2, 200, 260),
        launch(3, 30), kernel("gemm", 7, 3, 110, 140),
        launch(4, 40), kernel("gemm", 7, 4, 150, 170),
        span("dmuon-wait:muon/forward#0", 50, 55),
        launch(5, 60), kernel("gemm", 7, 5, 205, 300),
        span("dmuon-wait:muon/forward#1", 70, 75),
        launch(6, 80), kernel("gemm", 7, 6, 300, 310), kernel("copy", 8, 6, 172, 174),
    ]  # fmt: skip
    found = read_overlap({"traceEvents": events})["muon/forward"]
    assert found.seconds == pytest.approx(160e-6)
    assert found.stalled_seconds == pytest.approx(30e-6), "of the first 170 to 200; the second had ended by itself"
    assert found.unstalled_ratio == pytest.approx(1 - 30 / 160)
    assert found.exposed_seconds == pytest.approx(160e-6 - (30 + 20 + 2 + 55) * 1e-6)


def test_a_late_host_is_no_stall() -> None:
    """The last kernel ends at 20 µs, the gather at 100; the host comes to its wait at 60, so compute waited for 40."""
    events = [
        launch(1, 5), kernel("gemm", 7, 1, 10, 20),
        span("dmuon:muon/forward#0", 20, 30), launch(2, 25), kernel("nccl", 20, 2, 28, 100),
        span("dmuon-wait:muon/forward#0", 60, 65),
        launch(3, 70), kernel("gemm", 7, 3, 101, 120),
        span("dmuon-wait:muon/forward#0", 130, 135),  # behind the last kernel: nothing stands
    ]  # fmt: skip
    assert read_overlap({"traceEvents": events})["muon/forward"].stalled_seconds == pytest.approx(40e-6)
