"""Case 32. Symptom elsewhere: a gradient above 65504 is cast to float16 before it is normalised, and turns infinite."""

from __future__ import annotations

import pytest
import torch

from dmuon_runtime import newton_schulz


@pytest.mark.parametrize("scale", [1e5, 1e10, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_gradients_stay_in_the_band(scale: float, dtype: torch.dtype) -> None:
    matrix = (torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    result = newton_schulz(matrix)
    assert result.dtype == dtype and bool(result.isfinite().all())
    assert float(torch.linalg.svdvals(result.float())[0]) < 1.3
    assert float(torch.linalg.svdvals(result.float())[:8].min()) > 0.5


@pytest.mark.parametrize("scale", [1.0, 1e3, 2e4])
def test_float16_input_up_to_its_largest_values(scale: float) -> None:
    """The norm of the matrix is beyond float16; its elements are not."""
    matrix = (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)).add(1) * scale).half()
    assert float(matrix.float().norm()) > 65504 or scale < 2e4
    result = newton_schulz(matrix)
    assert bool(result.isfinite().all())
    torch.testing.assert_close(result.float(), newton_schulz(matrix.float()), rtol=0, atol=1e-3)
