"""Spans on device events, with events that a test marks: what is counted of a collective, and of a wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from dmuon_runtime import process_groups, spans
from dmuon_runtime.counters import Counters
from dmuon_runtime.spans import DeviceSpan, Event, HostSpan
from dmuon_runtime.transport import Transport


@dataclass
class Device:
    """A device whose clock a test sets; ``reached`` is how far it has come."""

    now_ms: float = 0.0
    reached: float = float("inf")


class Mark:
    """An event that was recorded at a moment of the device's clock."""

    def __init__(self, device: Device) -> None:
        self._device, self.at_ms = device, device.now_ms

    def record(self) -> None:
        self.at_ms = self._device.now_ms

    def query(self) -> bool:
        return self.at_ms <= self._device.reached

    def synchronize(self) -> None:
        self._device.reached = max(self._device.reached, self.at_ms)

    def elapsed_time(self, end_event: object) -> float:
        assert isinstance(end_event, Mark)
        return end_event.at_ms - self.at_ms


class Probe:
    """A side stream: what waits on it does not hold the current one up."""

    def __init__(self, device: Device) -> None:
        self._device, self._before_ms = device, device.now_ms

    def __enter__(self) -> None:
        self._before_ms = self._device.now_ms

    def __exit__(self, *_: object) -> None:
        self._device.now_ms = self._before_ms


class Collective:
    """Ends at ``end_ms``: whoever waits for it on a stream goes on there or later."""

    def __init__(self, device: Device, end_ms: float) -> None:
        self._device, self._end_ms = device, end_ms

    def wait(self) -> bool:
        self._device.now_ms = max(self._device.now_ms, self._end_ms)
        return True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(DeviceSpan, "_record", lambda _self: Mark(device))

    return device


def collective(device: Device, start_ms: float, end_ms: float, previous: Event | None = None) -> DeviceSpan:
    device.now_ms = start_ms
    span = DeviceSpan(cast(torch.cuda.Stream, Probe(device)), previous)
    span.follow(Collective(device, end_ms))  # type: ignore[arg-type]
    return span


def wait(device: Device, span: DeviceSpan, at_ms: float, end_ms: float) -> None:
    device.now_ms = at_ms
    span.wait(Collective(device, end_ms))  # type: ignore[arg-type]


def test_what_compute_hid_is_not_exposed(device: Device) -> None:
    span = collective(device, 0, 10)
    wait(device, span, at_ms=7, end_ms=10)
    assert span.seconds() == pytest.approx(0.010) and span.exposed_seconds() == pytest.approx(0.003)


def test_a_wait_after_the_end_exposes_nothing(device: Device) -> None:
    span = collective(device, 0, 10)
    wait(device, span, at_ms=12, end_ms=10)
    assert span.seconds() == pytest.approx(0.010) and span.exposed_seconds() == 0


def test_time_in_the_queue_is_nobodys_and_a_wait_through_it_exposes_the_span_at_most(device: Device) -> None:
    first = collective(device, 0, 10)
    second = collective(device, 1, 14, first.end)
    wait(device, second, at_ms=2, end_ms=14)  # twelve ms, of which eight are the first one's
    assert second.seconds() == pytest.approx(0.004)
    assert second.exposed_seconds() == pytest.approx(0.004)


def test_compute_that_waits_for_a_gather_behind_a_publication_waits_for_what_is_left_of_that_one_too(
    device: Device,
) -> None:
    published = collective(device, 0, 10)
    published.pass_by(Collective(device, 10))  # type: ignore[arg-type]
    gathered = collective(device, 10, 13)
    device.now_ms = 6
    published.hold_up()
    wait(device, gathered, at_ms=6, end_ms=13)
    device.reached = 5
    assert published.seconds() is None, "nobody knows yet where compute will stand"
    device.reached = float("inf")
    assert (published.exposed_seconds(), gathered.exposed_seconds()) == pytest.approx((0.004, 0.003))


def test_a_publication_that_ended_before_compute_came_is_hidden(device: Device) -> None:
    published = collective(device, 0, 10)
    published.pass_by(Collective(device, 10))  # type: ignore[arg-type]
    device.now_ms = 12
    published.hold_up()
    assert published.seconds() == pytest.approx(0.010) and published.exposed_seconds() == 0


def test_nothing_is_said_before_the_device_is_there(device: Device) -> None:
    span = collective(device, 0, 10)
    assert span.seconds() is None, "nobody has waited for it yet"
    wait(device, span, at_ms=7, end_ms=10)
    device.reached = 9
    assert span.seconds() is None
    device.reached = 10
    assert span.seconds() == pytest.approx(0.010)


def test_nothing_is_said_before_compute_has_come_to_its_wait(device: Device) -> None:
    span = collective(device, 0, 10)
    wait(device, span, at_ms=12, end_ms=10)
    device.reached = 11
    assert span.seconds() is None, "how long it waited is not known yet"
    device.reached = 12
    assert (span.seconds(), span.exposed_seconds()) == (pytest.approx(0.010), 0)


def test_nothing_piles_up_where_nobody_takes_snapshots(device: Device) -> None:
    counters = Counters()
    for step in range(400):
        device.now_ms = float(step)
        update = DeviceSpan()
        update.finish()
        counters.add_owner_compute(update, num_matrices=1)
        for _ in range(4):
            span = collective(device, step, step)
            wait(device, span, at_ms=step, end_ms=step)
            counters.add_collective(("muon", "forward"), 8, span)
    assert max(len(counters._compute), len(counters._issued), len(counters._pending)) < 300


def test_an_update_counts_once_the_device_has_done_it(device: Device) -> None:
    counters = Counters()
    for begin_ms, end_ms in ((0, 10), (20, 50)):
        device.now_ms = begin_ms
        span = DeviceSpan()
        device.now_ms = end_ms
        span.finish()
        counters.add_owner_compute(span, num_matrices=3)
    device.reached = 30
    assert [counters.owner_compute_seconds() for _ in range(2)] == pytest.approx([0.010, 0.010])
    device.reached = 50
    assert counters.owner_compute_seconds() == pytest.approx(0.040) == counters.snapshot().owner_compute_seconds
    assert (counters.snapshot().ns_planned_matrices, counters.snapshot().pending_spans) == (6, 0)


def test_a_host_that_waits_for_the_device_takes_times_as_they_come(device: Device) -> None:
    counters, key = Counters(), ("muon", "forward")
    gathered, published, late = collective(device, 0, 10), collective(device, 10, 20), collective(device, 20, 30)
    for span in (gathered, published, late):
        counters.add_collective(key, 8, span)
    wait(device, gathered, at_ms=7, end_ms=10)
    published.pass_by(Collective(device, 20))  # type: ignore[arg-type]
    wait(device, late, at_ms=25, end_ms=30)
    device.reached = 0
    counters.settle()
    assert device.reached == 10, "no further than to the first for which compute does not wait"
    assert counters.snapshot().comm[key].seconds == pytest.approx(0.010)
    device.now_ms = 18
    published.hold_up()
    counters.settle()
    assert device.reached == 30
    found = counters.snapshot()
    assert (found.pending_spans, found.comm[key].collectives, found.comm[key].payload_bytes) == (0, 3, 24)
    assert found.comm[key].seconds == pytest.approx(0.030)
    assert found.comm[key].exposed_seconds == pytest.approx(0.003 + 0.002 + 0.005)


def test_events_of_a_counted_span_serve_again_but_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device, made, spare = Device(), list[Mark](), list[Event]()

    def make(enable_timing: bool) -> Mark:
        assert enable_timing
        made.append(Mark(device))
        return made[-1]

    monkeypatch.setattr(spans, "torch", SimpleNamespace(Event=make))
    previous: Event | None = None
    for at_ms in (0, 20, 40):
        device.now_ms = at_ms
        span = DeviceSpan(cast(torch.cuda.Stream, Probe(device)), previous, spare)
        span.follow(Collective(device, at_ms + 10))  # type: ignore[arg-type]
        wait(device, span, at_ms=at_ms + 7, end_ms=at_ms + 10)
        assert (span.seconds(), span.exposed_seconds()) == pytest.approx((0.010, 0.003))
        span.release()
        previous = span.end
        assert previous not in spare, "the next one counts from it"
    assert len(made) == 3 + 1 + 1, "a start, an end and where compute waits; then only an end for each"
    span.hold_up()
    assert len(spare) == 2, "a publication that was counted had ended: nothing is left to be marked"


def test_a_host_that_wakes_up_late_from_its_wait_exposes_no_more_than_the_collective_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late:
        """Ends a second after it was issued; who waits for it gets the processor back at 5 s."""

        def get_future(self) -> Late:
            return self

        def add_done_callback(self, callback: Callable[[object], None]) -> None:
            self.done = callback

        def wait(self) -> bool:
            now.s = 1.0
            self.done(self)
            now.s = 5.0
            return True

    now, work = SimpleNamespace(s=0.0), Late()
    monkeypatch.setattr(spans, "time", SimpleNamespace(perf_counter=lambda: now.s))
    span = HostSpan()
    span.follow(work)  # type: ignore[arg-type]
    span.wait(work)  # type: ignore[arg-type]
    assert (span.seconds(), span.exposed_seconds()) == (1.0, 1.0)


def test_a_collective_on_a_device_counts_from_behind_its_issue() -> None:
    """The host needs a tenth of a millisecond to issue one, in which the device may have nothing to do."""
    done = list[str]()
    transport = object.__new__(Transport)
    transport.counters, transport._last_end = Counters(), {}
    span = SimpleNamespace(end="end", follow=lambda work: done.append(f"follow {work}"))

    def start(_place: object) -> object:
        done.append("start")
        return span

    def issue() -> object:
        done.append("issue")
        return "work"

    transport._device_span = start  # type: ignore[assignment, method-assign]
    payload = SimpleNamespace(device=torch.device("cuda"), nbytes=8)
    axis = SimpleNamespace(size=2, name="shard")
    transport._issue(issue, axis, "weights", ("muon", "forward"), (payload,))  # type: ignore[arg-type]
    assert done == ["issue", "start", "follow work"]
    assert transport._last_end == {("shard", "weights"): "end"}, "from which the next one there counts"


def test_collectives_go_before_compute_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[object, object]]()

    def new_group(_ranks: list[int], *, backend: str, pg_options: object, use_local_synchronization: bool) -> None:
        assert use_local_synchronization
        made.append((backend, pg_options))

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda **options: options), raising=False)
    for backend in ("gloo", "nccl", "cpu:gloo,cuda:nccl"):
        process_groups._new_group([0, 1], backend)
    high = {"is_high_priority_stream": True}
    assert made == [("gloo", None), ("nccl", high), ("cpu:gloo,cuda:nccl", high)]
