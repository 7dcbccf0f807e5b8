"""Case 12. Symptom elsewhere: an epsilon in the normalisation swallows small gradients, and large ones overflow."""

from __future__ import annotations

import pytest
import torch

from dmuon_runtime import NewtonSchulz


@pytest.mark.parametrize("backend", ["gram", "direct"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e18, 1e20, 1e30])
def test_the_update_has_the_same_norm_at_every_scale(backend: str, scale: float) -> None:
    matrix = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    ns = NewtonSchulz("gram" if backend == "gram" else "direct")
    expected = ns(matrix)
    assert float(ns(matrix * scale).norm()) == pytest.approx(float(expected.norm()), rel=1e-4)
    assert 7 < float(expected.norm()) < 9, "64 singular values near 1"


def test_exact_zero_gives_exact_zero() -> None:
    assert torch.equal(NewtonSchulz()(torch.zeros(64, 128)), torch.zeros(64, 128))
