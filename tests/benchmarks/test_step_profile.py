"""Where a step's time goes, read from a trace small enough to do by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.step_profile import BACKPROP, UPDATE, classify, read_profile


def _event(name: str, begin_us: float, duration_us: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin_us, "dur": duration_us}


def test_a_step_is_cut_where_the_update_begins() -> None:
    events = [
        _event("nvjet_tst", 0, 3000),
        _event("ncclDevKernel_Broadcast", 1000, 4000),
        _event("Optimizer.step#Muon.step", 6000, 4000, "gpu_user_annotation"),
        _event("kernel_quackgemm_symmetricGemmSymmetricSm90", 6000, 2000),
        _event("_apply_change", 8500, 1000),
        _event("Memcpy DtoD", 9500, 500, "gpu_memcpy"),
    ]
    found = read_profile({"traceEvents": events})
    assert found[BACKPROP] == {"matrix products": 3.0, "communication": 4.0, "idle": 0.0, "whole": 5.0}
    assert found[UPDATE] == {
        "symmetric products": 2.0, "momentum, AdamW, weights": 1.0, "copies and casts": 0.5, "idle": 0.5, "whole": 4.0
    }  # fmt: skip


def test_every_kernel_has_a_class() -> None:
    assert classify("something new") == "other element-wise"
    assert classify("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16") == "attention"
    assert classify("_partials") == "normalisation of matrices"


def test_a_trace_of_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="take it on a GPU"):
        read_profile({"traceEvents": [_event("aten::mm", 0, 1, "cpu_op")]})
