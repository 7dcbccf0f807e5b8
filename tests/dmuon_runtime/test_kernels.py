"""Kernels: equal results, who decides which one runs, and truthful reports."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from dmuon_runtime import _last_product, ledger
from dmuon_runtime._ns_iterations import direct_iteration
from dmuon_runtime.coefficients import POLAR_EXPRESS_COEFFICIENTS
from dmuon_runtime.kernels import KERNELS, KernelUnavailable, _cute_sm80, get_backend_status, get_ns_backend, syrk_quack
from dmuon_runtime.kernels import _registry as registry
from dmuon_runtime.kernels._blocked import Blocked
from dmuon_runtime.kernels._cublas import plain_product
from dmuon_runtime.kernels._registry import KernelChoice, active_kernel, decide_choice
from dmuon_runtime.kernels._settings import kernel_from_environment
from dmuon_runtime.newton_schulz import NewtonSchulz

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DMUON_NS_KERNEL", raising=False)
    kernel_from_environment.cache_clear()
    yield
    kernel_from_environment.cache_clear()


def set_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DMUON_NS_KERNEL", value)
    kernel_from_environment.cache_clear()


@pytest.mark.parametrize("size", [1, 2, 7, 8, 16, 33])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (-0.5, 2.0)])
@pytest.mark.parametrize("with_c", [False, True])
def test_blocked_equals_cublas(size: int, alpha: float, beta: float, with_c: bool) -> None:
    x = torch.randn(3, size, 20, generator=torch.Generator().manual_seed(size))
    c = x @ x.mT if with_c else None
    expected = KERNELS["cublas"].symmetric(x, x.mT, c, alpha=alpha, beta=beta)
    result = Blocked(leaf=2).symmetric(x, x.mT, c, alpha=alpha, beta=beta)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected, alpha * x @ x.mT + (0 if c is None else beta * c), rtol=1e-5, atol=1e-5)


def test_out_is_written_even_over_nan() -> None:
    x, out = torch.ones(1, 4, 4), torch.full((1, 4, 4), torch.nan)
    for kernel in (KERNELS["cublas"], Blocked(leaf=2)):
        assert kernel.symmetric(x, x, alpha=0.5, out=out) is out
        assert torch.equal(out, torch.full((1, 4, 4), 2.0))


@pytest.mark.parametrize(
    ("argument", "environment", "deterministic", "expected"),
    [
        ("blocked", "cublas", True, KernelChoice("blocked", "argument")),
        ("auto", "blocked", True, KernelChoice("blocked", "environment")),
        ("auto", "auto", True, KernelChoice("cublas", "deterministic")),
        ("auto", None, False, KernelChoice("auto", "detection")),
    ],
)
def test_precedence(argument: str, environment: str | None, deterministic: bool, expected: KernelChoice) -> None:
    assert decide_choice(argument, environment, deterministic) == expected


def test_unknown_names_are_refused_with_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"kernel='quak'.*auto, quack"):
        NewtonSchulz(kernel="quak")
    set_environment(monkeypatch, "fast")
    with pytest.raises(ValueError, match="DMUON_NS_KERNEL='fast'"):
        NewtonSchulz()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU may run them")
@pytest.mark.parametrize(("name", "cure"), [("quack", r"SM90\+"), ("cute_sm80", r"SM80\+")])
def test_a_named_kernel_that_cannot_run_fails_at_construction(name: str, cure: str) -> None:
    with pytest.raises(KernelUnavailable, match=cure) as caught:
        NewtonSchulz(kernel=name)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_environment_counts_only_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "blocked")
    assert NewtonSchulz().kernel_on(CPU) == "blocked"
    assert NewtonSchulz(kernel="cublas").kernel_on(CPU) == "cublas"
    assert get_backend_status()["auto_choice"] == "blocked"
    with pytest.warns(UserWarning, match="environment says blocked"):
        NewtonSchulz(deterministic=True)


def test_reports_say_that_a_kernel_of_the_environment_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "quack", _Absent())
    set_environment(monkeypatch, "quack")
    with pytest.raises(KernelUnavailable, match="asked for by environment") as caught:
        NewtonSchulz()
    status = get_backend_status()
    assert (status["auto_choice"], status["auto_error"]) == (None, str(caught.value))
    assert "kernel=" not in get_ns_backend() and f"NewtonSchulz() fails: {caught.value}" in get_ns_backend()
    set_environment(monkeypatch, "cublas")
    assert get_backend_status()["auto_choice"] == "cublas" and "auto_error" not in get_backend_status()


def test_argument_against_deterministic_warns_and_runs() -> None:
    with pytest.warns(UserWarning, match="argument says blocked"):
        ns = NewtonSchulz(kernel="blocked", deterministic=True)
    assert ns.kernel_on(CPU) == "blocked"


def test_launches_are_counted_under_the_kernel_that_ran() -> None:
    def count(name: str) -> int:
        return sum(c.launches for (kernel, _), c in ledger.snapshot().items() if kernel == name)

    before = {name: count(name) for name in KERNELS}
    NewtonSchulz(kernel="blocked")(torch.ones(4, 8))
    NewtonSchulz()(torch.ones(4, 8))
    assert {name: count(name) - before[name] for name in KERNELS} == {
        "quack": 0, "cute_sm80": 0, "blocked": 16, "cublas": 16,
    }  # fmt: skip


class _Absent(syrk_quack.Quack):
    """quack on a machine that lacks it."""

    def available(self, device: torch.device) -> tuple[bool, str]:
        return False, "not installed"


class _FakeDevice(syrk_quack.Quack):
    """quack on a machine that has it."""

    def available(self, device: torch.device) -> tuple[bool, str]:
        return (True, "fake") if syrk_quack.ADAPTER_READY else super().available(device)


def test_the_quack_switch_takes_effect_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(KERNELS, "quack", _FakeDevice())
    named, auto = decide_choice("quack", None, False), decide_choice("auto", None, False)
    assert active_kernel(named, CPU).name == active_kernel(auto, CPU).name == "quack"
    monkeypatch.setattr(syrk_quack, "ADAPTER_READY", False)
    assert active_kernel(named, CPU).name == active_kernel(auto, CPU).name == "cublas"
    assert active_kernel(named, CPU).name == "cublas"
    assert [record.getMessage() for record in caplog.records].count(
        "Newton-Schulz runs on cublas instead of quack: switched off: syrk_quack.ADAPTER_READY is False"
    ) == 1, "said once"


GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretend that cuda:0 has a capability, and that quack and Triton are installed or not."""

    def pretend(capability: tuple[int, int], *, quack: bool, triton: bool) -> None:
        missing = ImportError("No module named 'quack'")
        modules = {"quack.gemm_symmetric": SimpleNamespace(gemm_symmetric=print)}
        clear()
        monkeypatch.setenv("QUACK_CACHE_DIR", "elsewhere")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        importer = SimpleNamespace(import_module=modules.__getitem__ if quack else Mock(side_effect=missing))
        monkeypatch.setattr(syrk_quack, "importlib", importer)
        monkeypatch.setattr(_cute_sm80, "_module", lambda: SimpleNamespace() if triton else None)

    def clear() -> None:
        syrk_quack._available_on.cache_clear()
        syrk_quack._import_product.cache_clear()

    monkeypatch.setattr(registry, "_warned", set())
    yield pretend
    clear()


@pytest.mark.parametrize(
    ("capability", "quack", "triton", "expected", "reason"),
    [
        ((9, 0), True, True, "quack", None),
        ((9, 0), False, True, "cublas", "quack: quack-kernels is not importable.*pip install 'dmuon-service.quack.'"),
        ((10, 0), True, False, "quack", None),
        ((8, 0), True, True, "cute_sm80", None),
        ((8, 7), False, True, "cute_sm80", None),
        ((8, 0), True, False, "cublas", "cute_sm80: needs triton; pip install triton"),
        ((7, 5), True, True, "cublas", None),
    ],
)
def test_the_ladder(
    gpu: Callable[..., None], caplog: pytest.LogCaptureFixture, capability: tuple[int, int], quack: bool, triton: bool,
    expected: str, reason: str | None,
) -> None:  # fmt: skip
    """``auto`` on each generation, what the reports say of it, and the one warning where something is missing."""
    gpu(capability, quack=quack, triton=triton)
    assert [NewtonSchulz().kernel_on(GPU) for _ in range(2)] == [expected] * 2
    status = get_backend_status()
    assert status["auto_choice"] == expected and status["sm_version"] == 10 * capability[0] + capability[1]
    assert status["quack_available"] is (quack and capability[0] >= 9)
    assert status["cute_sm80_available"] is (triton and capability[0] >= 8)
    assert f"kernel={expected} (SM{capability[0]}{capability[1]}, " in get_ns_backend()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (reason is not None), said
    assert reason is None or re.search(f"runs on cublas instead of {reason}", said[0])


@pytest.mark.parametrize(
    ("name", "capability", "cure"),
    [
        ("quack", (9, 0), r"quack-kernels is not importable.*pip install 'dmuon-service\[quack\]'"),
        ("quack", (8, 0), r"needs SM90\+, found SM80"),
        ("cute_sm80", (8, 0), "pip install triton"),
        ("cute_sm80", (7, 5), r"needs SM80\+, found SM75"),
    ],
)
def test_a_named_kernel_fails_at_construction_with_what_to_install(
    gpu: Callable[..., None], name: str, capability: tuple[int, int], cure: str
) -> None:
    gpu(capability, quack=False, triton=False)
    with pytest.raises(KernelUnavailable, match=cure):
        NewtonSchulz(kernel=name)


def test_switching_quack_off_reaches_auto_and_its_reports(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu((9, 0), quack=True, triton=True)
    ns = NewtonSchulz()
    assert ns.kernel_on(GPU) == get_backend_status()["auto_choice"] == "quack"
    monkeypatch.setattr(syrk_quack, "ADAPTER_READY", False)
    assert ns.kernel_on(GPU) == get_backend_status()["auto_choice"] == "cublas"
    assert "kernel=cublas" in get_ns_backend() and get_backend_status()["quack_available"] is False
    assert sum("ADAPTER_READY is False" in record.getMessage() for record in caplog.records) == 1, "said once"
    with pytest.raises(KernelUnavailable, match="ADAPTER_READY is False"):
        NewtonSchulz(kernel="quack")
    monkeypatch.setattr(syrk_quack, "ADAPTER_READY", True)
    assert ns.kernel_on(GPU) == "quack", "and back"


@pytest.mark.parametrize("kernel", ["cublas", "blocked", "quack"])
def test_quack_multiplies_last_only_where_quack_was_chosen(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Its plain GEMM writes the last product in another dtype; whoever named another kernel does not get it."""
    products: list[torch.dtype] = []

    def rectangular(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        products.append(dtype)
        return torch.bmm(left, right).to(dtype)

    monkeypatch.setattr(syrk_quack, "rectangular_ready", lambda left, right: True)
    monkeypatch.setattr(syrk_quack, "rectangular", rectangular)
    monkeypatch.setattr(_last_product, "MIN_FLOPS_FOR_QUACK", 0.0)
    monkeypatch.setitem(KERNELS, "quack", _OnACpu())
    ns = NewtonSchulz(kernel=kernel)
    ns(torch.ones(4, 8, dtype=torch.bfloat16))
    assert products == [torch.bfloat16] * (kernel == "quack")
    with ns.falling_back():
        ns.orthogonalize([torch.ones(4, 8, dtype=torch.bfloat16)])
    assert len(products) == (kernel == "quack"), "falling back leaves quack alone"


class _OnACpu(_FakeDevice):
    """quack that computes on a CPU, whatever the size."""

    def serves(self, short_dim: int, long_dim: int, dtype: torch.dtype) -> bool:
        return True

    def _launch(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, alpha: float, beta: float, out: torch.Tensor
    ) -> None:
        plain_product(a, b, c, alpha, beta, out)

    def adds_at_once(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        return False


def test_quack_serves_only_what_it_can() -> None:
    quack = syrk_quack.Quack()
    assert quack.serves(256, 1000, torch.float16)
    assert not quack.serves(256, 1001, torch.float16), "rows of 16 bytes"
    assert not quack.serves(128, 1024, torch.float16), "small"
    assert not quack.serves(256, 1024, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what a machine without a GPU reports")
def test_reports_on_a_cpu() -> None:
    assert get_backend_status() == {
        "sm_version": None,
        "auto_choice": "cublas",
        "quack_available": False,
        "cute_sm80_available": False,
        "cublas_always_available": True,
    }
    assert get_ns_backend() == "Gram NS · kernel=cublas (CPU, universal fallback)"


class AddsAtOnce(Blocked):
    """A kernel that adds ``a X`` in the product, as quack's does on a GPU."""

    def adds_at_once(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("shape", [(2, 24, 24), (1, 16, 40), (1, 40, 16)], ids=str)
def test_adding_in_the_product_is_adding_to_the_diagonal(shape: tuple[int, int, int]) -> None:
    """The direct form in both ways, tall and wide, in float64."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    x = x / torch.linalg.matrix_norm(x)[:, None, None]
    found = []
    for kernel in (Blocked(), AddsAtOnce()):
        (long,), q = direct_iteration([x], POLAR_EXPRESS_COEFFICIENTS, kernel)
        found.append(torch.bmm(*long.operands(q)))
    assert torch.allclose(found[0], found[1], rtol=1e-9, atol=1e-12)
