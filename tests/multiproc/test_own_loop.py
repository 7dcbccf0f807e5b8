"""The example of a training loop of one's own, run as its first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 12


def test_the_example_learns_counts_and_goes_on_from_what_it_saved() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "own_loop.py"), "--steps", str(STEPS)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) +loss ([\d.]+)", done.stdout)}
    assert losses[0] > 5 and losses[10] < losses[0] - 1
    counted = {(route, phase): int(n) for route, phase, n in re.findall(r"(\w+) (\w+) +(\d+) collectives", done.stdout)}
    for phase in ("forward", "backward", "reduce"):
        assert counted["muon", phase] == STEPS * 8, "four layers, two owners"
    assert f"Newton-Schulz: {STEPS * 14} matrices of this rank" in done.stdout
    assert "from the saved state: the same losses" in done.stdout
