"""Case 26. Symptom elsewhere: rounding noise of bfloat16 fills the directions in which a gradient has no signal.

The choice here: normalise in fp32, iterate in fp32 on a CPU and in float16 on CUDA; in bfloat16 only on request.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.ns_accuracy import Emulated
from dmuon_runtime import POLAR_EXPRESS_COEFFICIENTS, newton_schulz
from dmuon_runtime._elementwise import normalized
from dmuon_runtime._ns_iterations import gram_iteration
from dmuon_runtime.newton_schulz import default_restarts


def outer_product() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.outer(torch.randn(32, generator=generator), torch.randn(48, generator=generator))


def test_a_direction_without_signal_stays_empty() -> None:
    values = torch.linalg.svdvals(newton_schulz(outer_product()))
    assert 0.7 < float(values[0]) < 1.13
    assert float(values[1]) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_input_gives_equal_bits(dtype: torch.dtype) -> None:
    matrix = outer_product().to(dtype)
    assert torch.equal(newton_schulz(matrix), newton_schulz(matrix.clone()))


def second_value(dtype: torch.dtype) -> float:
    """Second singular value after iterating the outer product in ``dtype``."""
    kernel = Emulated(dtype)
    given, restarts = kernel.round(normalized(outer_product())), default_restarts(5)
    longs, q = gram_iteration([given], POLAR_EXPRESS_COEFFICIENTS, restarts, kernel)
    return float(torch.linalg.svdvals(kernel.rectangular(*longs[0].operands(q))[0])[1])


def test_what_half_precision_would_make_of_it() -> None:
    """Why bfloat16 is not the default: its rounding alone becomes an update; a longer mantissa leaves far less."""
    assert second_value(torch.bfloat16) > 0.1 > 2 * second_value(torch.float32)
    assert second_value(torch.float16) < second_value(torch.bfloat16)
