"""The cache of graphs: what it keeps alive is bounded in number and in bytes. Fake graphs on a CPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from dmuon_runtime._ns_graphs import MAX_SEEN, Captured, GraphCache
from dmuon_runtime._ns_iterations import Long

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
