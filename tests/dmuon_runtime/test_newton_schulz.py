"""Orthogonalisation: the laws that hold for any form, kernel, scale and grouping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dmuon_runtime import _cpu_precision, ledger
from dmuon_runtime.coefficients import (
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    apply_polynomials,
    coefficients_for,
    polar_express,
)
from dmuon_runtime.functional import direct_newton_schulz, gram_newton_schulz, newton_schulz
from dmuon_runtime.kernels import _cublas, registered_kernel
from dmuon_runtime.kernels._blocked import Blocked
from dmuon_runtime.newton_schulz import NewtonSchulz, default_restarts, orthogonality_error
from dmuon_runtime.orthogonality import orthogonality_bound

SHAPES = [(64, 128), (128, 64), (48, 48), (3, 16, 40), (2, 2, 40, 16)]


@pytest.fixture(params=["float32", "bfloat16"])
def within(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Compute in float32, or in bfloat16 as on a CPU that has units for it: the error allowed, of elements below 1.

    Any CPU can compute it, without units slowly. Large matrices are those of a side of 32 here.
    """
    before = torch.get_float32_matmul_precision()
    if request.param == "bfloat16":
        monkeypatch.setattr(_cpu_precision, "_has_units", lambda: True)
        monkeypatch.setattr(_cublas, "MIN_HALVED", 32)
        torch.set_float32_matmul_precision("medium")
    yield 1e-4 if request.param == "float32" else 3e-2
    torch.set_float32_matmul_precision(before)


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(matrix: Tensor, ns: NewtonSchulz, steps: int = 5) -> Tensor:
    """The same polynomial on the singular values, in float64."""
    x = matrix.double()
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    lifted = apply_polynomials(s, coefficients_for(ns.coefficients, steps))
    return torch.matmul(u * lifted[..., None, :], vh)


def launches() -> dict[tuple[str, str], tuple[int, int]]:
    return {key: (count.launches, count.matrices) for key, count in ledger.snapshot().items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ns", [NewtonSchulz(), NewtonSchulz("direct"), NewtonSchulz(kernel="blocked")], ids=repr)
@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_equals_the_polynomial_of_the_singular_values(
    ns: NewtonSchulz, shape: tuple[int, ...], steps: int, within: float
) -> None:
    matrix = gaussian(*shape)
    result = ns(matrix, steps)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), reference(matrix, ns, steps), rtol=0, atol=within)


def test_restarts_do_not_change_the_value() -> None:
    matrix = gaussian(32, 96, dtype=torch.float64)
    for restarts in [(), (1,), (2, 4), (1, 2, 3, 4)]:
        ns = NewtonSchulz(restart_iterations=restarts)
        torch.testing.assert_close(ns(matrix), reference(matrix, ns), rtol=0, atol=1e-9)


def test_singular_values_lie_in_the_band() -> None:
    for coefficients, low, high in [(None, 0.72, 1.13), (YOU_COEFFICIENTS, 0.47, 1.15)]:
        values = torch.linalg.svdvals(newton_schulz(gaussian(64, 128), coefficients=coefficients))
        assert low < float(values.min()) and float(values.max()) < high


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e18, 1e20, 1e30])
@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_scale_does_not_matter(backend: str, scale: float, within: float) -> None:
    ns = NewtonSchulz("gram" if backend == "gram" else "direct")
    matrix = gaussian(64, 128)
    expected = ns(matrix)
    torch.testing.assert_close(ns(matrix * scale), expected, rtol=0, atol=within / 2)
    assert float(expected.norm()) == pytest.approx(7.9, abs=0.6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_input_is_normalised_in_float32(dtype: torch.dtype, within: float) -> None:
    matrix = gaussian(16, 16).mul(1e4 if dtype == torch.float16 else 1e15).to(dtype)
    result = newton_schulz(matrix)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), reference(matrix, NewtonSchulz()), rtol=0, atol=1e-2 + within)


def test_zero_gives_exact_zero_and_does_not_touch_its_neighbours(within: float) -> None:
    batch = gaussian(3, 16, 32)
    batch[1] = 0
    result = newton_schulz(batch)
    assert torch.equal(result[1], torch.zeros(16, 32))
    torch.testing.assert_close(result[[0, 2]], newton_schulz(batch[[0, 2]]), rtol=0, atol=within / 20)
    rows = gaussian(16, 32)
    rows[4:8] = 0
    assert float(newton_schulz(rows)[4:8].abs().max()) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_matrix_stays_alone(bad: float, within: float) -> None:
    batch = gaussian(3, 16, 32)
    clean = newton_schulz(batch)
    batch[1, 3, 3] = bad
    for ns in (NewtonSchulz(), NewtonSchulz("direct"), NewtonSchulz(kernel="blocked")):
        result = ns(batch)
        assert bool(result[1].isnan().all())
        torch.testing.assert_close(result[[0, 2]], clean[[0, 2]], rtol=0, atol=within / 2)


def test_rank_one_stays_rank_one() -> None:
    values = torch.linalg.svdvals(newton_schulz(torch.outer(gaussian(32), gaussian(48, seed=1))))
    assert 0.7 < float(values[0]) < 1.13
    assert float(values[1]) < 1e-3


@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (1, 1), (8192, 2), (2, 1, 5)])
def test_degenerate_shapes(shape: tuple[int, ...], within: float) -> None:
    matrix = gaussian(*shape)
    for backend in (gram_newton_schulz, direct_newton_schulz):
        result = backend(matrix)
        assert result.shape == matrix.shape
        torch.testing.assert_close(result.double(), reference(matrix, NewtonSchulz()), rtol=0, atol=5 * within)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 0, 3)])
def test_matrices_without_elements_come_back(shape: tuple[int, ...]) -> None:
    assert newton_schulz(torch.zeros(shape)).shape == shape


def test_many_at_once_equal_one_by_one_and_share_the_small_products() -> None:
    matrices = [
        gaussian(*shape, seed=i) for i, shape in enumerate([(16, 40), (64, 16), (2, 16, 48), (24, 48), (40, 16)])
    ]
    ns = NewtonSchulz()
    before = launches()
    together = ns.orthogonalize(matrices)
    done = launches()[("cublas", "gram")]
    base = before.get(("cublas", "gram"), (0, 0))
    # Short side 16: 14 shared products and 2 Gram products for each of three shapes (16, 40), (64, 16), (16, 48) and
    # (40, 16); short side 24: 14 and 2.
    assert (done[0] - base[0], done[1] - base[1]) == (14 + 2 * 4 + 14 + 2, 6)
    for matrix, result in zip(matrices, together, strict=True):
        assert result.shape == matrix.shape
        torch.testing.assert_close(result, ns(matrix), rtol=0, atol=1e-6)


def test_inputs_are_never_modified(within: float) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for matrix in (gaussian(8, 5, dtype=dtype), gaussian(5, 8, dtype=dtype).T):
            kept = matrix.clone()
            NewtonSchulz().orthogonalize([matrix])
            NewtonSchulz("direct").orthogonalize([matrix])
            assert torch.equal(matrix, kept)


def test_square_matrices_run_direct_on_a_cpu_and_are_counted_so() -> None:
    before = launches().get(("cublas", "direct"), (0, 0))
    NewtonSchulz("gram")(gaussian(4, 32, 32))
    after = launches()[("cublas", "direct")]
    assert (after[0] - before[0], after[1] - before[1]) == (10, 4)


def test_steps_and_restarts_are_checked() -> None:
    assert [default_restarts(steps) for steps in (1, 3, 4, 5, 8)] == [(), (), (2,), (2,), (2, 4, 6)]
    with pytest.raises(ValueError, match="at least 1 step"):
        newton_schulz(gaussian(4, 4), 0)
    with pytest.raises(ValueError, match=r"\[5\] lie beyond the last of 5 steps"):
        newton_schulz(gaussian(4, 4), restart_iterations=[2, 5])
    with pytest.raises(ValueError, match="at least 1"):
        NewtonSchulz(restart_iterations=[0])
    with pytest.raises(ValueError, match=r"\[0\] \(3,\).*\[2\] \(2, 2\) torch.int64"):
        NewtonSchulz().orthogonalize([gaussian(3), gaussian(2, 2), torch.ones(2, 2, dtype=torch.int64)])


@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_subnormal_input_is_like_any_other(backend: str, within: float) -> None:
    """1e-40 is below the smallest normal float32, and has few bits left: the result is that of those bits."""
    ns = NewtonSchulz("gram" if backend == "gram" else "direct")
    matrix = gaussian(32, 64) * 1e-40
    assert float(matrix.abs().max()) < 1.2e-38
    torch.testing.assert_close(ns(matrix).double(), reference(matrix, ns), rtol=0, atol=5 * within)


@pytest.mark.parametrize("shape", [(2, 20_000), (20_000, 2), (3, 4, 5000)])
def test_huge_aspect_ratios(shape: tuple[int, ...]) -> None:
    matrix = gaussian(*shape)
    for ns in (NewtonSchulz(), NewtonSchulz("direct")):
        torch.testing.assert_close(ns(matrix).double(), reference(matrix, ns), rtol=0, atol=1e-4)


def test_non_contiguous_input(within: float) -> None:
    base = gaussian(40, 3, 24)
    ns = NewtonSchulz()
    for view in (
        base.permute(1, 0, 2),
        base[::2, :, ::3].permute(1, 2, 0),
        base[:, 1].T,
        base[:, :1].expand(40, 3, 24),
    ):
        assert not view.is_contiguous()
        torch.testing.assert_close(ns(view), ns(view.contiguous()), rtol=0, atol=within)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_floating_dtype_comes_back_in_itself(dtype: torch.dtype) -> None:
    matrix = gaussian(24, 40, dtype=dtype)
    ns = NewtonSchulz()
    result = ns(matrix)
    assert result.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    torch.testing.assert_close(result.double(), reference(matrix, ns), rtol=0, atol=tolerance)


def test_mixed_dtypes_in_one_call(within: float) -> None:
    matrices = [gaussian(16, 24, seed=i, dtype=d) for i, d in enumerate((torch.float32, torch.bfloat16, torch.float64))]
    for matrix, result in zip(matrices, NewtonSchulz().orthogonalize(matrices), strict=True):
        assert result.dtype == matrix.dtype
        allowed = 1e-6 if matrix.dtype == torch.float64 else 5e-3 + within
        torch.testing.assert_close(result.double(), reference(matrix, NewtonSchulz()), rtol=0, atol=allowed)


def test_a_rank_without_matrices_has_nothing_to_do() -> None:
    assert NewtonSchulz().orthogonalize([]) == []


@pytest.mark.parametrize(
    ("bad", "found", "cure"),
    [
        (torch.ones(2, 2, dtype=torch.int32), r"\(2, 2\) torch.int32", "cast integers"),
        (torch.ones(2, 2, dtype=torch.complex64), r"\(2, 2\) torch.complex64", "split complex tensors"),
        (torch.ones(3), r"\(3,\) torch.float32", "give vectors two dims or to AdamW"),
        (torch.ones(()), r"\(\) torch.float32", "give vectors two dims"),
        (torch.zeros(0, 4, 8), r"\(0, 4, 8\), an empty batch", "leave empty batches out"),
        (torch.zeros(2, 0, 4, 8), r"\(2, 0, 4, 8\), an empty batch", "leave empty batches out"),
        (torch.eye(3).to_sparse(), r"\(3, 3\) torch.float32 with layout sparse_coo", "make sparse ones dense"),
        ([[1.0, 2.0]], "a list", "make tensors of other objects"),
        (None, "a NoneType", "make tensors of other objects"),
    ],
)
def test_what_is_no_matrix_is_refused_with_the_cure(bad: object, found: str, cure: str) -> None:
    with pytest.raises(ValueError, match=rf"found \[1\] {found}: .*{cure}"):
        NewtonSchulz().orthogonalize([gaussian(2, 2), bad])  # type: ignore[list-item]


def test_a_shard_is_not_taken_for_the_matrix(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shard = distribute_tensor(gaussian(8, 16), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match=r"\[0\] \(8, 16\), a distributed tensor: .*gather distributed ones"):
            newton_schulz(shard)
    finally:
        dist.destroy_process_group()


def test_bad_settings_are_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match="there are gram, direct"):
        NewtonSchulz("gramm")  # type: ignore[arg-type]
    for restarts in ([1.5], [3, 3], [-1], 3, [True], "3"):
        with pytest.raises(ValueError, match=r"different whole steps of at least 1.*default for 5 steps"):
            NewtonSchulz(restart_iterations=restarts)  # type: ignore[arg-type]
    for steps in (2.5, "5", None, True, -1):
        with pytest.raises(ValueError, match="steps must be a whole number of at least 1"):
            newton_schulz(gaussian(4, 4), steps)  # type: ignore[arg-type]
    for coefficients in ([1.0, 2.0, 3.0], ["abc"], [(1.0, 2.0)], ["123"], [("1", "2", "3")]):
        with pytest.raises(ValueError, match=r"coefficients\[0\] must be three finite numbers.*one triple a step"):
            NewtonSchulz(coefficients=coefficients)  # type: ignore[arg-type]
    for coefficients in (5, {}, "abc"):
        with pytest.raises(ValueError, match="at least one triple"):
            NewtonSchulz(coefficients=coefficients)  # type: ignore[arg-type]
    assert NewtonSchulz(coefficients=torch.eye(3)).coefficients[0] == (1.0, 0.0, 0.0), "an array is a set as well"  # type: ignore[arg-type]


def test_other_steps_have_other_coefficients() -> None:
    """A list that is cut would stay far from 1."""
    for steps in (2, 3, 4, 7):
        assert NewtonSchulz().plan(steps)[0] == polar_express(steps) != POLAR_EXPRESS_COEFFICIENTS[:steps]


class _Layouts(Blocked):
    """Remembers how the left operands of the Gram products lie."""

    name = "layouts"

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[int, ...]] = []

    def symmetric(self, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if a.shape[1] != a.shape[2]:
            assert a.data_ptr() == b.data_ptr(), "one operand, read twice"
            self.strides.append(a.stride()[1:])
        return super().symmetric(a, b, *args, **kwargs)


def test_a_tall_matrix_is_multiplied_as_it_lies() -> None:
    """Nothing is transposed in memory: its Gram product reads columns of what stayed row by row."""
    kernel = _Layouts()
    with registered_kernel(kernel):
        for backend, times in (("gram", 2), ("direct", 5)):
            ns = NewtonSchulz(backend, kernel="layouts")  # type: ignore[arg-type]
            ns.orthogonalize([gaussian(40, 16), gaussian(16, 40)])
            assert sorted(kernel.strides) == [(1, 16)] * times + [(40, 1)] * times
            kernel.strides.clear()


def test_orthogonality_error() -> None:
    orthogonal = torch.linalg.qr(gaussian(8, 5)).Q
    stack = torch.stack([orthogonal, 1.1 * orthogonal, torch.zeros(8, 5), torch.full((8, 5), torch.nan)])
    errors = orthogonality_error(stack)
    torch.testing.assert_close(errors, torch.tensor([0.0, 0.21, 0.0, torch.inf]), rtol=0, atol=1e-5)


def test_a_bound_on_it_is_near_it() -> None:
    orthogonal = torch.linalg.qr(gaussian(96, 64)).Q
    wide = torch.stack([torch.diag(torch.linspace(0.7, 1.2, 64)) @ orthogonal.mT, 1.1 * orthogonal.mT])
    odd = torch.stack([torch.zeros(64, 96), torch.full((64, 96), torch.nan)])
    errors, bounds = orthogonality_error(wide), orthogonality_bound(wide)
    torch.testing.assert_close(errors, torch.tensor([0.51, 0.21]), rtol=0, atol=1e-5)
    assert (bounds >= errors * (1 - 1e-5)).all() and (bounds <= errors * 64 ** (1 / 512) * (1 + 1e-5)).all()
    assert bounds[1] > errors[1] * 1.008, "where all singular values are equal it is as far off as it can be"
    assert orthogonality_bound(odd).tolist() == [0.0, math.inf]
    assert orthogonality_bound(1e15 * wide) == pytest.approx(orthogonality_error(1e15 * wide), rel=0.01)
    assert orthogonality_bound(1e20 * wide).tolist() == [math.inf, math.inf], "no NaN"
    assert orthogonality_bound(orthogonal.double()) < 1e-6 and orthogonality_bound(torch.zeros(0, 3)) == 0
