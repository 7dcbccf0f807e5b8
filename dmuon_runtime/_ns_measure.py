"""Measures, on this machine, what no rule knows: tiles of symmetric products, and Gram against direct.

The winner must beat the static rule by more than noise. On CUDA a candidate is captured a few times into a graph, so
that its own time counts and not the host's; a tile is checked against cuBLAS before it may win.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from dmuon_runtime._choice_store import ChoiceStore
from dmuon_runtime._ns_choices import Form
from dmuon_runtime._ns_groups import Group, Recipe, decide_form, is_open
from dmuon_runtime._ns_iterations import ns_flops
from dmuon_runtime.kernels import KERNELS
from dmuon_runtime.kernels._tiles import TILES, Product, candidate_tiles, decide_tile

__all__ = ["Measuring", "milliseconds"]

_log = logging.getLogger(__name__)

MARGIN: Final = 0.98
"""A candidate replaces the static rule's when it takes less than this share of its time."""
CPU_BUDGET_S: Final = 2.0
"""All that a CPU may spend; what does not fit follows the static rule."""
ROUNDS: Final = 7
WORK_FLOPS: Final = 2e11
"""About what is timed together as one sample on CUDA."""
MAX_ERROR: Final = 1e-2
MAX_ELEMENTS: Final = 2**29
"""Larger batches are timed by a part of them: what is measured must fit beside a model."""
Call = Callable[[], object]


class Measuring:
    """One measurement: ``found`` holds the winners of all classes that were asked for, known or measured now."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        recipe: Recipe,
        store: ChoiceStore,
        progress: Callable[[str], None] | None,
    ) -> None:
        self._device, self._dtype, self._recipe, self._store = device, dtype, recipe, store
        self._progress = progress or _log.info
        self._known = store.load()
        self._left_s = CPU_BUDGET_S
        self._rate: float | None = None
        self.found: dict[str, str] = {}

    def forms(self, forms: Sequence[Form]) -> None:
        """Choose the form for each of ``forms`` for which that is a question."""
        for form in forms:
            if is_open(form) and not self._is_known(form.key) and self._fits(form):
                size = f"{form.num_matrices} x {form.short_dim} x {form.long_dim}"
                self._progress(f"measuring the Gram form against the direct form on {size}")
                begin = time.perf_counter()
                usual = decide_form(form, {})
                self._settle(form.key, usual, milliseconds(self._form_calls(form), self._device))
                self._left_s -= time.perf_counter() - begin

    def tiles(self, group: Group, stacks: Sequence[tuple[int, int, int]]) -> None:
        """Choose the tiles of all symmetric products of a group of ``stacks`` [b, m, n]."""
        if group.kernel != "quack":
            return
        name = str(group.dtype).removeprefix("torch.")
        short_dim, total = group.short_dim, sum(stack[0] for stack in stacks)
        products = [Product(total, short_dim, short_dim, True, True, name)]
        products += [Product(b, short_dim, max(m, n), m <= n, False, name) for b, m, n in stacks]
        for product in products:
            if not self._is_known(product.key) and len(candidate_tiles(product)) > 1:
                sizes = f"{product.num_matrices} x {product.short_dim} x {product.inner_dim}"
                self._progress(f"measuring tiles {', '.join(candidate_tiles(product))} on {sizes}")
                usual = next(tile for tile in TILES if TILES[tile] == decide_tile(product, {}))
                calls = self._tile_calls(product)
                flops = 2.0 * product.num_matrices * short_dim**2 * product.inner_dim
                repeat = max(1, min(16, int(WORK_FLOPS / flops)))
                self._settle(product.key, usual, milliseconds(calls, self._device, repeat))

    def _is_known(self, key: str) -> bool:
        if key in self._known:
            self.found[key] = self._known[key]
        return key in self.found

    def _settle(self, key: str, usual: str, times: Mapping[str, float]) -> None:
        best = min(times, key=lambda name: times[name])
        if usual in times and times[best] > MARGIN * times[usual]:
            best = usual
        self.found[key] = best
        self._store.add({key: best})

    def _form_calls(self, form: Form) -> dict[str, Call]:
        b = min(form.num_matrices, max(1, MAX_ELEMENTS // (form.short_dim * form.long_dim)))
        shape = (b, form.short_dim, form.long_dim)
        x = self._random(shape) / (form.short_dim * form.long_dim) ** 0.5

        def call(algorithm: str) -> Call:
            long_dim = 0 if algorithm == "gram" else form.long_dim
            group = Group(self._device, self._dtype, form.short_dim, long_dim, form.kernel, algorithm)
            return lambda: _with_last_product(self._recipe, group, x)

        return {algorithm: call(algorithm) for algorithm in ("gram", "direct")}

    def _tile_calls(self, product: Product) -> dict[str, Call]:
        """Name to a call of each candidate whose result is right."""
        n, k = product.short_dim, product.inner_dim
        b = min(product.num_matrices, max(1, MAX_ELEMENTS // (n * max(n, k))))
        timed = replace(product, num_matrices=b)
        x = self._random((b, n, k) if product.contiguous else (b, k, n))
        left = (x if product.contiguous else x.mT).mul_(k**-0.5)
        c = torch.bmm(left, left.mT) if product.with_c else None
        out = torch.empty(b, n, n, device=self._device, dtype=self._dtype)
        alpha, beta = (0.5, 0.5) if product.with_c else (1.0, 1.0)  # as in use: factors of 1 are another kernel
        expected = KERNELS["cublas"].symmetric(left, left.mT, c, alpha=alpha, beta=beta)

        def call(tile: str) -> Call:
            kernel = KERNELS["quack"].tuned({timed.key: tile})
            return lambda: kernel.symmetric(left, left.mT, c, alpha=alpha, beta=beta, out=out)

        right: dict[str, Call] = {}
        for tile in candidate_tiles(timed):
            call(tile)()
            error = float((out.float() - expected.float()).norm() / expected.float().norm())
            if error <= MAX_ERROR:
                right[tile] = call(tile)
            else:
                _log.error("tile %s is wrong on %s (relative error %.1e) and is not used", tile, product, error)
        assert right, f"no tile computes {product}"
        return right

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        """Normal numbers that leave the generators of the training alone."""
        generator = torch.Generator(self._device).manual_seed(0)
        return torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)

    def _fits(self, form: Form) -> bool:
        """On a CPU, whether timing both forms fits into what is left of the budget."""
        if self._device.type == "cuda":
            return True
        if self._rate is None:
            x = self._random((512, 512))
            taken = milliseconds({"product": lambda: x @ x}, self._device, rounds=2)["product"]
            self._rate = 2 * 512**3 / taken * 1e3
        settings = (form.short_dim, form.long_dim, form.num_steps, form.num_restarts, 1.0)
        flops = form.num_matrices * sum(ns_flops(name, *settings) for name in ("gram", "direct"))
        return 3 * flops / self._rate < self._left_s


def _with_last_product(recipe: Recipe, group: Group, x: Tensor) -> list[Tensor]:
    longs, q = recipe.run(group, [x])
    return [torch.bmm(*long.operands(q)) for long in longs]


def milliseconds(
    calls: Mapping[str, Call], device: torch.device, repeat: int = 1, rounds: int | None = None
) -> dict[str, float]:
    """Time ``calls`` in turns: the median of graph replays on CUDA, the best of two calls after a first on a CPU."""
    if device.type != "cuda":
        for call in calls.values():
            call()
        seconds = {name: min(_seconds(call) for _ in range(rounds or 2)) for name, call in calls.items()}
        return {name: value * 1e3 for name, value in seconds.items()}
    replays = {name: _captured(call, repeat) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds or ROUNDS):
        for name, replay in replays.items():
            samples[name].append(_event_ms(replay, device) / repeat)
    return {name: statistics.median(values) for name, values in samples.items()}


def _seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _captured(call: Call, repeat: int) -> Call:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeat):
            call()
    graph.replay()
    return graph.replay


def _event_ms(replay: Call, device: torch.device) -> float:
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    torch.cuda.synchronize(device)
    start.record(stream)
    replay()
    end.record(stream)
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end))
