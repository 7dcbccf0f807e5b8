"""The cache of graphs: what it keeps alive is bounded in number and in bytes. Fake graphs on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from dmuon_runtime import _ns_graphs
from dmuon_runtime._ns_graphs import MAX_SEEN, Captured, GraphCache
from dmuon_runtime._ns_groups import Group, Recipe
from dmuon_runtime._ns_iterations import Long
from dmuon_runtime.ledger import LEDGER
from dmuon_runtime.newton_schulz import NewtonSchulz

CPU = torch.device("cpu")
MIB = 2**20


def fake(cache: GraphCache, input_mib: int, output_mib: int) -> Captured:
    """A graph with an input in the arena and outputs of its own."""
    inputs = cache.inputs([(input_mib, 512, 512)], torch.float32, CPU)
    q = torch.empty(output_mib, 512, 512)
    return Captured(cast(Any, None), inputs, ([Long(q[:1], False, slice(0, 1))], q), {})


def test_bytes_count_shared_memory_once() -> None:
    cache = GraphCache()
    for name in ("a", "b", "c"):
        cache.keep(name, fake(cache, 4, 2))
    assert cache.held_bytes() == (4 + 3 * 2) * MIB, "one arena, three outputs"


def test_the_least_recently_used_leaves_when_bytes_run_out(caplog: pytest.LogCaptureFixture) -> None:
    cache = GraphCache(max_bytes=8 * MIB)
    cache.keep("a", fake(cache, 1, 3))
    cache.keep("b", fake(cache, 1, 3))
    assert cache.find("a") is not None
    cache.keep("c", fake(cache, 1, 3))
    assert (cache.find("a") is None, cache.find("b") is None, len(cache)) == (False, True, 2)
    assert cache.held_bytes() == 7 * MIB, "what left is freed"
    cache.keep("d", fake(cache, 1, 3))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Newton-Schulz drops CUDA graphs"]


def test_the_newest_stays_however_large() -> None:
    cache = GraphCache(max_bytes=MIB)
    cache.keep("a", fake(cache, 1, 1))
    cache.keep("b", fake(cache, 1, 16))
    assert len(cache) == 1 and cache.find("b") is not None


def test_an_arena_that_was_outgrown_is_counted_until_its_graphs_are_gone() -> None:
    cache = GraphCache(max_graphs=2)
    cache.keep("small", fake(cache, 1, 1))
    cache.keep("large", fake(cache, 4, 1))
    assert cache.held_bytes() == (1 + 4 + 1 + 1) * MIB
    cache.keep("another", fake(cache, 2, 1))
    assert cache.find("small") is None
    assert cache.held_bytes() == (4 + 1 + 1) * MIB


def test_what_left_must_be_seen_twice_again() -> None:
    cache = GraphCache(max_graphs=1)
    assert [cache.worth_capturing("a") for _ in range(3)] == [False, True, True]
    cache.keep("a", fake(cache, 1, 1))
    cache.keep("b", fake(cache, 1, 1))
    assert [cache.worth_capturing("a") for _ in range(2)] == [False, True]


def test_keys_that_ran_once_are_bounded() -> None:
    cache = GraphCache()
    for number in range(MAX_SEEN + 5):
        cache.worth_capturing(number)
    assert not cache.worth_capturing(0), "forgotten"
    assert cache.worth_capturing(MAX_SEEN)


def test_clear_frees_everything() -> None:
    cache = GraphCache()
    cache.keep("a", fake(cache, 4, 2))
    cache.clear()
    assert (len(cache), cache.held_bytes()) == (0, 0)


class _Cuda:
    """What a capture calls of torch. ``breaks`` is what ``capture_end`` raises, ``dead`` what the device says then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks: Exception | None = None, dead: Exception | None = None):
        self.breaks, self.dead = breaks, dead
        self.stream, self.pools, self.recording, self.released = "default", 0, set[int](), list[int]()
        self.freed: list[torch.device] = []
        names = ("device", "current_stream", "stream", "graph", "graph_pool_handle", "synchronize")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}", lambda *args: nullcontext()))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        monkeypatch.setattr(_ns_graphs, "_free_generator", self.freed.append)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: self.released.append(pool), raising=False)

    def _current_stream(self, device: torch.device) -> str:
        return self.stream

    def _stream(self, stream: str) -> Any:
        def leave(*args: object) -> None:
            self.stream = stream

        return Mock(__enter__=Mock(), __exit__=leave)

    def _graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def _graph(self, graph: object, pool: int, capture_error_mode: str) -> Any:
        def enter(*args: object) -> None:
            assert pool not in self.recording, "already recording"
            self.stream = "capture"
            self.recording.add(pool)

        def leave(*args: object) -> None:
            if self.breaks is not None:
                raise self.breaks
            self.recording.remove(pool)
            self.stream = "default"

        return Mock(__enter__=enter, __exit__=leave)

    def _end(self, index: int, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("not currently recording")
        self.recording.remove(pool)

    def _synchronize(self, device: torch.device) -> None:
        if self.dead is not None:
            raise self.dead


def _work(inputs: Any) -> tuple[list[Long], Tensor]:
    LEDGER.add_launches({("cublas", "gram"): 1})
    return [Long(inputs[0], False, slice(0, 1))], inputs[0]


def _raises(inputs: Any) -> tuple[list[Long], Tensor]:
    raise NotImplementedError("asks the device\nand says more")


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    cuda = _Cuda(monkeypatch, None if ends else RuntimeError("CUDA error: capture invalidated\nfor debugging"))
    cache, before = GraphCache(), LEDGER.snapshot()
    inputs = cache.inputs([(1, 8, 8)], torch.float32, CPU)
    for key in ("a", "b"):
        assert [cache.worth_capturing(key), cache.worth_capturing(key)] == [False, True]
        assert cache.capture(key, inputs, _raises if ends else _work) is None
        assert not cache.worth_capturing(key), "eagerly from now on"
        assert (cuda.stream, cuda.recording) == ("default", set())
    cache.clear()
    assert [cache.worth_capturing("a") for _ in range(3)] == [False] * 3, "for good"
    cause = "NotImplementedError: asks the device" if ends else "RuntimeError: CUDA error: capture invalidated"
    (record,) = caplog.records
    assert record.getMessage().endswith(f"capturing failed: {cause}"), "once for a cause"
    assert (cache.num_refused, len(cache), LEDGER.snapshot()) == (2, 0, before)
    assert len(cuda.released) == (0 if ends else 2), "torch has let go, or we do"
    assert cuda.freed == [CPU, CPU]
    cuda.breaks = None
    assert cache.capture("c", inputs, _work) is cache.find("c") is not None, "others are captured as before"
    assert LEDGER.snapshot() == before, "a capture launches nothing"


def test_a_device_that_failed_is_no_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(monkeypatch, dead=RuntimeError("CUDA error: an illegal memory access was encountered"))
    cache = GraphCache()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cache.capture("a", cache.inputs([(1, 8, 8)], torch.float32, CPU), _raises)
    assert (cache.num_refused, cuda.stream) == (0, "default")


def test_a_group_whose_capture_failed_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    _Cuda(monkeypatch, breaks=RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    ns = NewtonSchulz(kernel="cublas")
    group, recipe = Group(CPU, torch.float32, 8, 0, "cublas", "gram"), Recipe(*ns.plan(5))
    assert [ns._graph("key", group, recipe, ((1, 8, 8),)) for _ in range(4)] == [None] * 4
    assert ns._graphs.num_refused == 1
