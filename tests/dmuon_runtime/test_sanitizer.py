"""Our own kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, of the CUDA toolkit"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_own_kernels_are_clean(tool: str) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
    program = [sys.executable, "-m", "tests.dmuon_runtime.own_kernels"]
    done = subprocess.run([*command, *program], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "all launched" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout, done.stdout[-2000:]
