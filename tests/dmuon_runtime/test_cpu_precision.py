"""bfloat16 on a CPU: on request alone, where it is faster, as accurate as torch's, and told as what it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from benchmarks.newton_schulz import KELLER_JORDAN, error_against_fp64
from dmuon_runtime import POLAR_EXPRESS_COEFFICIENTS, _cpu_precision
from dmuon_runtime._cpu_precision import decide_units
from dmuon_runtime._elementwise import normalized
from dmuon_runtime._ns_choices import Form
from dmuon_runtime._ns_groups import compute_dtype, decide_form, is_open
from dmuon_runtime.guard import KernelGuard
from dmuon_runtime.kernels import KERNELS
from dmuon_runtime.kernels._cublas import half_product, plain_product
from dmuon_runtime.kernels._settings import onednn_limit
from dmuon_runtime.newton_schulz import NewtonSchulz

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def _in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu_precision, "_has_units", lambda: True)
    torch.set_float32_matmul_precision("medium")


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_it_needs_a_request_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_units in (False, True):
        monkeypatch.setattr(_cpu_precision, "_has_units", lambda has=has_units: has)
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            narrow = has_units and precision == "medium"
            assert compute_dtype(torch.float32, CPU) == (torch.bfloat16 if narrow else torch.float32)
            assert compute_dtype(torch.float64, CPU) == torch.float64
            assert compute_dtype(torch.float32, torch.device("cuda", 0)) == torch.float16


def test_onednns_own_switch_is_a_request_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to name its precision where the two switches differ; Newton-Schulz does not."""
    monkeypatch.setattr(_cpu_precision, "_has_units", lambda: True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    assert compute_dtype(torch.float32, CPU) == torch.bfloat16


def test_units_are_what_torch_names_and_onednn_may_use() -> None:
    zen = {"avx512_f": True, "avx512_bf16": True, "amx_bf16": False, "architecture": "x86_64"}
    assert decide_units(zen, None, True) == decide_units(zen, "ALL", True) == "avx512_bf16"
    assert decide_units({"amx_bf16": True}, "AVX10_1_512_AMX", True) == "amx_bf16"
    assert decide_units({**zen, "avx512_bf16": False}, None, True) is None
    assert decide_units({}, None, True) is None
    assert decide_units(zen, "AVX512_CORE", True) is None, "oneDNN is held to instructions that have none"
    assert decide_units(zen, None, False) is None, "torch without oneDNN"


def test_the_limit_of_onednn_is_read_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert onednn_limit() is None
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "avx2 ")
    assert onednn_limit() == "AVX2"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert onednn_limit() == "AVX512_CORE"


@pytest.mark.parametrize("shape", [(128, 128), (64, 256), (256, 64)])
@pytest.mark.usefixtures("_in_bfloat16")
def test_the_error_is_at_most_torchs(shape: tuple[int, int]) -> None:
    """Each against its own polynomial in fp64; ``a`` added to a diagonal in bfloat16 would be above it."""
    g = gaussian(*shape)
    theirs = _muon._zeropower_via_newtonschulz(g, KELLER_JORDAN, 5, 1e-7)
    ours = error_against_fp64(g, NewtonSchulz()(g), POLAR_EXPRESS_COEFFICIENTS)
    assert 1e-3 < ours <= error_against_fp64(g, theirs, [KELLER_JORDAN] * 5) < 2e-2


@pytest.mark.usefixtures("_in_bfloat16")
def test_the_direct_form_runs_and_is_foretold() -> None:
    """Also at an aspect ratio where the Gram form costs half, and whatever was measured before."""
    ns, shapes = NewtonSchulz(), [(3, 16, 80), (16, 80), (24, 24)]
    assert ns.expected(shapes, torch.float32, CPU) == {("cublas", "direct"): 5}
    form = Form("cublas", 1, 512, 512, "bfloat16", 5, 1)
    assert not is_open(form) and decide_form(form, {form.key: "gram"}) == "direct"
    assert ns.prepare([(512, 512)], torch.float32, CPU).entries == {}, "nothing is a question"


@pytest.mark.usefixtures("_in_bfloat16")
def test_a_breaker_is_of_the_dtype_that_ran() -> None:
    ns = NewtonSchulz(kernel="blocked")
    ns.guard = KernelGuard()
    ns(gaussian(16, 32))
    torch.set_float32_matmul_precision("highest")
    ns(gaussian(16, 32))
    assert {key.dtype for key in ns.guard.breakers} == {"bfloat16", "float32"}
    assert not ns.guard.findings


@pytest.mark.parametrize("num_rows", [16, 37])
@pytest.mark.parametrize("num_columns", [16, 50])
def test_half_a_product_is_the_whole_and_symmetric(num_rows: int, num_columns: int) -> None:
    """Strips that do not divide the side, batches, a right operand that lies either way, with a third or without."""
    x = gaussian(2, num_rows, num_columns).bfloat16()
    whole = KERNELS["cublas"].symmetric(x, x.mT)
    for left, right, c in [(x, x.mT, None), (x.mT.contiguous().mT, x.mT, None), (whole, whole.mT, whole)]:
        expected, found = torch.empty_like(whole), torch.full_like(whole, torch.nan)
        plain_product(left, right, c, 0.5, -1.5, expected)
        half_product(left, right, c, 0.5, -1.5, found)
        assert torch.equal(found, found.mT)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


def test_a_norm_that_float32_holds_spares_a_pass_and_changes_no_matrix() -> None:
    """Scaled matrices beside ones that are not: each is as it is alone."""
    batch = gaussian(5, 8, 12)
    batch[1] *= 1e-30
    batch[2] *= 1e30
    batch[3] = 0
    together = normalized(batch)
    assert all(torch.equal(normalized(one)[0], other) for one, other in zip(batch, together, strict=True))
    norms = together.norm(dim=(-2, -1))
    torch.testing.assert_close(norms, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), rtol=0, atol=1e-6)
