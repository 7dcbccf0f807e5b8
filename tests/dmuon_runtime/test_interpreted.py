"""The fused passes against plain torch where there is no GPU: in Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which comes with torch for CUDA")
def test_fused_passes_are_plain_torch() -> None:
    """In a process of its own: what is interpreted is settled when the kernels are imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.dmuon_runtime.interpreted"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "all alike" in done.stdout, done.stdout + done.stderr
