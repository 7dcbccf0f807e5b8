"""``python -m benchmarks`` runs every benchmark that this machine can run."""

from __future__ import annotations

import importlib

__all__ = ["CPU_BENCHMARKS"]

CPU_BENCHMARKS = ("newton_schulz", "partition", "cost_model", "control_plane")

if __name__ == "__main__":
    for name in CPU_BENCHMARKS:
        print(f"== {name}")
        importlib.import_module(f"benchmarks.{name}").main([])
