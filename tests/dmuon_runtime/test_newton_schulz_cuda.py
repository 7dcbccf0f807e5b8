"""Newton-Schulz on a GPU: every kernel against fp64, graphs against eager runs, and what the profiler saw launched."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dmuon_runtime._choice_store import choice_store
from dmuon_runtime._ns_choices import Choices
from dmuon_runtime._ns_graphs import GraphCache
from dmuon_runtime._ns_groups import Recipe, kept_bytes
from dmuon_runtime._ns_measure import Measuring
from dmuon_runtime.breaker import Thresholds
from dmuon_runtime.guard import KernelGuard
from dmuon_runtime.kernels import KERNELS, registered_kernel, syrk_quack
from dmuon_runtime.kernels._blocked import Blocked
from dmuon_runtime.kernels._tiles import Product, candidate_tiles
from dmuon_runtime.ledger import LEDGER, NsCount, snapshot
from dmuon_runtime.newton_schulz import NewtonSchulz, orthogonality_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(1, 512, 512), (3, 1024, 4096), (2, 4096, 1024), (24, 768, 3072), (1, 264, 1000), (2, 2048, 2048)]
LARGE = (24, 768, 3072)
"""Large enough for quack's plain GEMM to do the last product in bfloat16."""


def kernels() -> list[str]:
    return [name for name, kernel in KERNELS.items() if kernel.available(torch.device("cuda", 0))[0]]


def reference(g: Tensor, ns: NewtonSchulz, steps: int = 5) -> Tensor:
    """The same polynomial in fp64, directly."""
    x = g.double()
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for a, b, c in ns.plan(steps)[0]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def matrices(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("name", ["quack", "cute_sm80", "blocked", "cublas"])
@pytest.mark.parametrize("backend", ["gram", "direct"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_equals_fp64(name: str, backend: str, shape: tuple[int, ...]) -> None:
    if name not in kernels():
        pytest.skip(f"{name}: {KERNELS[name].available(torch.device('cuda', 0))[1]}")
    g = matrices(shape)
    ns = NewtonSchulz(backend, kernel=name)  # type: ignore[arg-type]
    results = [ns(g) for _ in range(3)]  # eager, captured, replayed
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])
    expected = reference(g, ns)
    error = (results[0].double() - expected).norm() / expected.norm()
    assert error < 0.008, f"{error:.1e}: bfloat16 output alone rounds to 2e-3"


def names_launched(call: Callable[[], object]) -> list[str]:
    """Names of the device kernels that ``call`` launches, by the profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        call()
        torch.cuda.synchronize()
    return [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("name", ["quack", "cute_sm80", "blocked", "cublas"])
@pytest.mark.parametrize("shape", [(12, 20), (128, 128), (512, 512), (512, 2048)], ids=str)
def test_one_large_singular_value_keeps_its_direction(name: str, shape: tuple[int, int]) -> None:
    """The gradients of real layers have one; see "From the left" in _ns_iterations.py."""
    if name not in kernels():
        pytest.skip(f"{name} does not run here")
    torch.manual_seed(0)
    n, m = shape
    u, v = (torch.linalg.qr(torch.randn(rows, n, device="cuda", dtype=torch.float64)).Q for rows in (n, m))
    for rest in (3e-2, 3e-3):
        values = torch.cat([torch.ones(1), torch.full((n - 1,), rest)]).cuda().double()
        g = ((u * values) @ v.mT).float()
        ns = NewtonSchulz("gram", kernel=name)
        found, expected = ns(g).double(), reference(g, ns)
        assert (found - expected).norm() / expected.norm() < 0.1
        assert ((found - expected) @ v[:, 0]).norm() / (expected @ v[:, 0]).norm() < 0.25


@pytest.mark.parametrize("name", ["quack", "cute_sm80", "cublas"])
@pytest.mark.parametrize(("backend", "symmetric", "rectangular"), [("gram", 16, 2), ("direct", 10, 5)])
def test_the_profiler_saw_what_the_ledger_counted(name: str, backend: str, symmetric: int, rectangular: int) -> None:
    if name not in kernels():
        pytest.skip(f"{name} does not run here")
    ns, g = NewtonSchulz(backend, kernel=name), matrices((2, 1024, 2048))  # type: ignore[arg-type]
    for _ in range(2):
        ns(g)
    before = snapshot()[name, backend].launches
    names = names_launched(lambda: ns(g))
    counted = snapshot()[name, backend].launches - before
    found = [n for n in names if _is_symmetric(n, name)]
    plain = rectangular if name == "cublas" else 0  # products Q X run on cuBLAS as well
    assert len(found) == counted + plain == symmetric + plain, names
    others = [n for n in names for other in ("quack", "cute_sm80") if other != name and _is_symmetric(n, other)]
    assert not others, others


def test_who_did_not_choose_quack_gets_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its symmetric products nor its plain one behind them: by name, by fallback, by the switch."""
    if "quack" not in kernels():
        pytest.skip("quack does not run here")
    g = matrices(LARGE)

    def of_quack(call: Callable[[], object]) -> int:
        for _ in range(2):  # eager, captured
            call()
        return sum("quack" in name.lower() for name in names_launched(call))

    ns = NewtonSchulz()
    assert of_quack(lambda: ns(g)) == 17, "16 symmetric ones and the last"
    for other in (NewtonSchulz(kernel="cublas"), NewtonSchulz(kernel="blocked"), NewtonSchulz(deterministic=True)):
        assert of_quack(lambda other=other: other(g)) == 0, other
    with ns.falling_back():
        assert of_quack(lambda: ns(g)) == 0
    monkeypatch.setattr(syrk_quack, "ADAPTER_READY", False)
    assert of_quack(lambda: ns(g)) == 0
    monkeypatch.setattr(syrk_quack, "ADAPTER_READY", True)
    assert of_quack(lambda: ns(g)) == 17


def _is_symmetric(kernel_name: str, kernel: str) -> bool:
    lowered = kernel_name.lower()
    if kernel == "quack":
        return "symmetric" in lowered
    if kernel == "cute_sm80":
        return lowered == "_kernel"
    return "gemm" in lowered or "nvjet" in lowered


def test_switching_the_adapter_off_reaches_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    if "quack" not in kernels():
        pytest.skip("quack does not run here")
    ns, g = NewtonSchulz("gram"), matrices((1, 1024, 1024))
    for _ in range(3):
        ns(g)
    torch.cuda.synchronize()
    before = snapshot()
    monkeypatch.setattr(syrk_quack, "ADAPTER_READY", False)
    for _ in range(3):
        ns(g)
    torch.cuda.synchronize()
    after = snapshot()

    def launches(counts: dict[tuple[str, str], NsCount], kernel: str) -> int:
        return sum(count.launches for (name, _), count in counts.items() if name == kernel)

    assert launches(after, "quack") == launches(before, "quack")
    assert launches(after, "cublas") >= launches(before, "cublas") + 3 * 10


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e18, 1e30])
def test_any_scale(scale: float) -> None:
    g = matrices((1, 512, 1024), torch.float32)
    ns = NewtonSchulz()
    difference = (ns(g * scale) - ns(g)).norm() / ns(g).norm()
    assert difference < 1e-2, "another scale rounds other bits to float16"


@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_subnormal_input_is_like_any_other(backend: str) -> None:
    """Few bits are left of it: the result is that of those bits."""
    ns = NewtonSchulz(backend)  # type: ignore[arg-type]
    for g in (matrices((2, 512, 1024), torch.float32) * 1e-40, matrices((512, 512), torch.float16) * 2**-20):
        assert 0 < float(g.abs().max()) < torch.finfo(g.dtype).smallest_normal
        expected = reference(g, ns)
        assert (ns(g).double() - expected).norm() / expected.norm() < 0.008


def test_elements_of_float16_up_to_its_largest() -> None:
    g = (matrices((512, 768), torch.float32).clamp(-3, 3) * 2e4).half()
    ns = NewtonSchulz()
    assert g.float().norm() > torch.finfo(torch.float16).max
    expected = reference(g, ns)
    assert (ns(g).double() - expected).norm() / expected.norm() < 0.008


def test_rank_one_stays_rank_one() -> None:
    """In float16 the noise of rounding is lifted with the signal, and stays far below it."""
    torch.manual_seed(0)
    g = torch.outer(torch.randn(512, device="cuda"), torch.randn(1024, device="cuda"))
    for name in kernels():
        values = torch.linalg.svdvals(NewtonSchulz(kernel=name)(g))
        assert 0.7 < float(values[0]) < 1.13, name
        assert float(values[1]) < 0.2, name


@pytest.mark.parametrize("shape", [(2, 20_000), (20_000, 2), (256, 65_536), (65_536, 256), (1, 300)], ids=str)
def test_huge_aspect_ratios(shape: tuple[int, ...]) -> None:
    g = matrices(shape, torch.float32)
    for ns in (NewtonSchulz(), NewtonSchulz("direct"), NewtonSchulz(kernel="cublas")):
        expected = reference(g, ns)
        assert (ns(g).double() - expected).norm() / expected.norm() < 0.015


def test_non_contiguous_input() -> None:
    base = matrices((512, 3, 768))
    ns = NewtonSchulz()
    for view in (base.permute(1, 0, 2), base[:, 1].T, base[:, :1].permute(1, 2, 0), base[::2, :, ::3].permute(1, 2, 0)):
        assert not view.is_contiguous()
        assert torch.equal(ns(view), ns(view.contiguous()))


def test_a_batch_longer_than_a_grid() -> None:
    """Every axis of a grid but the first ends at 65 535."""
    g = matrices((70_000, 8, 8))
    ns = NewtonSchulz(kernel="cublas")
    expected = reference(g[-3:], ns)
    for _ in range(3):
        result = ns(g)
    assert (result[-3:].double() - expected).norm() / expected.norm() < 0.05, "small ones round most"
    x = matrices((70_000, 64, 16), torch.float16) / 32
    if "cute_sm80" in kernels():
        found = KERNELS["cute_sm80"].symmetric(x, x.mT)
        torch.testing.assert_close(found[-3:], torch.bmm(x[-3:], x[-3:].mT), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_zero_and_non_finite_stay_apart(bad: float) -> None:
    g = matrices((3, 512, 1024))
    g[0] = 0
    g[1, 3, 5] = bad
    for ns in (NewtonSchulz(), NewtonSchulz("direct"), NewtonSchulz(kernel="cublas")):
        for _ in range(3):
            u = ns(g)
            assert (u[0] == 0).all(), u[0]
            assert u[1].isnan().all(), u[1]
            assert u[2].isfinite().all(), u[2]
        assert orthogonality_error(u[2]).item() < 0.6


def test_mixed_group_is_bit_equal_to_one_by_one() -> None:
    parts = [matrices((2, 1024, 1024)), matrices((3, 1024, 4096)), matrices((1, 2048, 1024))]
    ns = NewtonSchulz("gram", kernel="cublas")
    together = ns.orthogonalize(parts)
    for part, result in zip(parts, together, strict=True):
        assert (result.double() - reference(part, ns)).norm() / result.double().norm() < 0.008
    again = ns.orthogonalize(parts)
    assert all(torch.equal(x, y) for x, y in zip(together, again, strict=True))


def test_memory_does_not_grow() -> None:
    ns, g = NewtonSchulz(), matrices((4, 1024, 2048))
    for _ in range(4):
        ns(g)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        ns(g)
    assert torch.cuda.memory_allocated() <= before


def test_every_candidate_tile_is_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "quack" not in kernels():
        pytest.skip("quack does not run here")
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))
    device = torch.device("cuda", torch.cuda.current_device())
    measuring = Measuring(device, torch.float16, Recipe(*NewtonSchulz().plan(5)), choice_store(device), None)
    for contiguous, with_c, number, size in itertools.product((False, True), (False, True), (1, 8), (512, 4096)):
        if contiguous or not with_c:
            product = Product(number, size, size, contiguous, with_c, "float16")
            assert tuple(measuring._tile_calls(product)) == candidate_tiles(product), product


def test_prepare_leaves_nothing_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))
    shapes, device = [(2, 1024, 1024), (1, 1024, 2048), (2048, 512)], torch.device("cuda", torch.cuda.current_device())
    ns, said = NewtonSchulz(), list[str]()
    torch.cuda.synchronize()
    before = snapshot()
    choices = ns.prepare(shapes, torch.float32, device, said.append)
    assert snapshot() == before, "what is prepared updates nothing"
    assert said and (bool(choices.entries) or "quack" not in kernels())
    num_graphs, held = len(ns._graphs), ns._graphs.held_bytes()
    parts = [matrices(shape, torch.float32) for shape in shapes]
    results = ns.orthogonalize(parts)
    assert num_graphs == len(ns._graphs) > 0 and held == ns._graphs.held_bytes(), "captured before"
    for part, result in zip(parts, results, strict=True):
        expected = reference(part, ns)
        assert (result.double() - expected).norm() / expected.norm() < 0.008
    other = NewtonSchulz()
    other.adopt(Choices.from_json(choices.to_json()))
    assert all(torch.equal(x, y) for x, y in zip(results, other.orthogonalize(parts), strict=True))
    again = list[str]()
    assert NewtonSchulz().prepare(shapes, torch.float32, device, again.append) == choices
    assert len(again) == 1, "nothing is measured twice"


class _Own(Blocked):
    """A kernel of one's own, right or ``factor`` times too large."""

    name = "own"

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        super()._launch(a, b, c, alpha, beta, out)
        out.mul_(self._factor)


def test_a_graph_is_of_one_kernel_not_of_a_name() -> None:
    """What stood there before under the same name is not replayed."""
    g, results = matrices((2, 512, 1024)), list[Tensor]()
    with registered_kernel(_Own(1.0)):
        ns = NewtonSchulz(kernel="own")
        for factor in (1.0, 0.5):
            with registered_kernel(_Own(factor)):
                results += [ns(g) for _ in range(3)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[3], results[5])
    assert not torch.allclose(results[2], results[3], rtol=0.1)


class _Waits(Blocked):
    """Right, but it waits for the device, which no capture allows."""

    name = "waits"

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        super()._launch(a, b, c, alpha, beta, out)
        torch.cuda.current_stream().synchronize()


def test_what_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    g, stream = matrices((2, 512, 1024)), torch.cuda.current_stream()
    torch.manual_seed(1)
    expected_random = torch.rand(8, device="cuda")
    torch.manual_seed(1)
    with registered_kernel(_Waits()):
        ns = NewtonSchulz(kernel="waits")
        results = [ns(g) for _ in range(4)]
        assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(8, device="cuda"), expected_random), "dropout goes on, with the same numbers"
    assert all(torch.equal(result, results[0]) for result in results)
    assert (len(ns._graphs), ns._graphs.num_refused) == (0, 1)
    assert ["without a CUDA graph" in record.getMessage() for record in caplog.records].count(True) == 1
    ns = NewtonSchulz(kernel="cublas")
    expected = [ns(g) for _ in range(3)]
    assert len(ns._graphs) == 1 and torch.equal(expected[0], expected[2]), "captures after it go well"


def test_graphs_leave_when_they_keep_too_much() -> None:
    ns = NewtonSchulz()
    ns._graphs = GraphCache(max_bytes=2**24)
    for size in (512, 1024, 2048):
        for _ in range(3):
            ns(matrices((2, size, size)))
    assert len(ns._graphs) == 1


def test_graphs_keep_what_the_cost_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))
    shapes = [(1024, 4096)] * 100 + [(4096, 1024)] * 40 + [(512, 2048)] * 3  # of which none takes the direct form
    ns = NewtonSchulz(kernel="cublas")
    ns.prepare(shapes, torch.float32, torch.device("cuda", 0))
    assert ns._graphs.held_bytes() == pytest.approx(kept_bytes(tuple(shapes)), rel=0.01)


def test_a_graph_owns_its_workspace() -> None:
    """Others clear torch's workspaces, as torch.compile's graphs do, and whoever captured first may be gone."""
    g = matrices((128, 65536))  # a product that cuBLAS splits along the inner dim, through the workspace
    first, second = (NewtonSchulz(kernel="cublas") for _ in range(2))
    for ns in (first, second):
        for _ in range(3):
            expected = ns(g)
    del first, ns
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    canaries = [torch.zeros(size, device="cuda") for size in (1 << 18, 1 << 20, 2 << 20, 8 << 20, 8 << 20, 16 << 20)]
    assert torch.equal(second(g), expected)
    assert not any(canary.any() for canary in canaries)


def test_a_comparison_counts_apart_from_its_first_call_to_its_replays() -> None:
    ns, given = NewtonSchulz(kernel="cute_sm80"), [matrices((2, 512, 1024), torch.float32)]
    ns.guard = KernelGuard(Thresholds(check_every_calls=1, slow_factor=1e6))  # a neighbour on the GPU is no finding
    before, compared = snapshot(), LEDGER.compared()
    for _ in range(5):
        ns.guard.begin()
        ns.orthogonalize(given)
        torch.cuda.synchronize()
    ns.guard.begin()
    after = snapshot()
    assert not ns.guard.findings
    assert {key for key, count in after.items() if count.launches != before.get(key, NsCount()).launches} == {
        ("cute_sm80", "gram")
    }
    assert LEDGER.compared()["cublas", "gram"] > compared.get(("cublas", "gram"), 0)
