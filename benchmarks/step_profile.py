"""Where the time of a step goes on the device, from traces of the step benchmark: a table, a JSON and a picture.

    python -m benchmarks.step --trace FOLDER …
    python -m benchmarks.step_profile "before=FOLDER/ours_pure_Z3.json.gz" "after=…" [--picture FILE.png]

A trace holds one step of one rank. Its kernels are put into classes by name, before and after the optimizer's step
began; kernels that run at once count each. Idle is the time within the step in which no kernel runs: the device waits
for the host.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import print_table, write_result
from benchmarks.traces import length_us, merged

__all__ = ["classify", "main", "read_profile"]

UPDATE, BACKPROP = "update", "forward and backward"
CLASSES: tuple[tuple[str, str], ...] = (
    ("communication", r"^nccl"),
    ("attention", r"sdpa|flash|fmha"),
    ("symmetric products", r"gemm_?symmetric"),
    ("matrix products", r"gemm|nvjet|cutlass"),
    ("normalisation of matrices", r"^_(partials|divide|add_identity)"),
    ("momentum, AdamW, weights", r"^_(momentum|adamw|apply_change)|multi_tensor_apply|fused_adam"),
    ("copies and casts", r"copy|CatArray|Memcpy|Memset|^_cast|FillFunctor"),
    ("other element-wise", r""),
)
"""The first pattern that a kernel's name matches gives its class."""
COLOURS = ("#7b3294", "#2c7fb8", "#d95f02", "#1b9e77", "#66a61e", "#e6ab02", "#a6761d", "#999999", "#e0e0e0")


def classify(name: str) -> str:
    """Return the class of a kernel."""
    return next(label for label, pattern in CLASSES if re.search(pattern, name))


def read_profile(trace: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return milliseconds by class, ``idle`` and ``whole`` among them, of what ran before and after the update began.

    Raises:
        ValueError: the trace has no kernels, or no optimizer step on the device.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    steps = [event for event in events if event.get("cat") == "gpu_user_annotation" and _is_step(event)]
    if not kernels or not steps:
        raise ValueError("the trace needs kernels and a range Optimizer.step on the device: take it on a GPU")
    border = min(float(event["ts"]) for event in steps)
    return {
        BACKPROP: _phase([event for event in kernels if float(event["ts"]) < border]),
        UPDATE: _phase([event for event in kernels if float(event["ts"]) >= border]),
    }


def _is_step(event: Mapping[str, Any]) -> bool:
    return str(event.get("name", "")).startswith("Optimizer.step")


def _phase(kernels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for event in kernels:
        found[classify(str(event["name"]))] += float(event["dur"])
    intervals = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in kernels]
    busy = merged(intervals)
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    found["idle"] = whole - length_us(busy)
    found["whole"] = whole
    return {label: value / 1e3 for label, value in found.items()}


def picture(profiles: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Draw a bar for each trace and phase."""
    from matplotlib.figure import Figure

    labels = [label for label, _ in CLASSES] + ["idle"]
    rows = [(phase, name) for phase in (BACKPROP, UPDATE) for name in profiles]
    figure = Figure(figsize=(11, 1.2 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for label, colour in zip(labels, COLOURS, strict=True):
        widths = [profiles[name][phase].get(label, 0.0) for phase, name in rows]
        axes.barh(range(len(rows)), widths, left=left, color=colour, label=label)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.0f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [f"{phase}\n{name}" for phase, name in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds on the device, one step")
    axes.margins(x=0.08)
    axes.legend(fontsize=8, ncols=2, loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """Read the traces, print, write and draw."""
    parser = argparse.ArgumentParser(prog="benchmarks.step_profile")
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    profiles: dict[str, dict[str, dict[str, float]]] = {}
    devices: set[str] = set()
    for item in options.traces:
        name, _, path = item.partition("=")
        if not path:
            parser.error(f"a trace needs a name: NAME=TRACE, found {item!r}")
        with gzip.open(path) as file:
            trace = json.load(file)
        profiles[name] = read_profile(trace)
        devices.add(trace["deviceProperties"][0]["name"])
    rows = [
        {"trace": name, "phase": phase, **{label: found.get(label, 0.0) for label in (*dict(CLASSES), "idle", "whole")}}
        for name, phases in profiles.items()
        for phase, found in phases.items()
    ]
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    write_result("step_profile", rows, device=" and ".join(sorted(devices)), unit="milliseconds on the device")
    if options.picture is not None:
        picture(profiles, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
