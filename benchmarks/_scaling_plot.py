"""The picture of the scaling results against GPUs: step overhead over AdamW, measured and predicted, and below it the
share of a step for which compute stood still because of the communication of the forward and the backward."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._verdicts import EXPOSED_SHARE, LOSS_TOLERANCE, exposed_share
from benchmarks.common import RESULTS, print_table
from benchmarks.cost_model import predict
from benchmarks.workloads import WORKLOADS
from dmuon_runtime.chips import CHIPS, ChipFigures, chip_key, find_chip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["compare_losses", "plot", "predicted_rows", "results_of"]

Result = Mapping[str, Any]


def results_of(workload: str, folder: Path = RESULTS) -> list[Result]:
    """Return the results of a workload, smallest world first; of GPUs where there are some, else of CPUs.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"scaling-{workload}-*.json"))]
    on_gpus = [result for result in found if result["device"] != "cpu"]
    if not found:
        raise FileNotFoundError(f"no scaling-{workload}-*.json in {folder}; run benchmarks.scaling first")
    return sorted(on_gpus or found, key=lambda result: int(result["world_size"]))


def predicted_rows(results: Sequence[Result], chip: ChipFigures) -> list[dict[str, Any]]:
    """Return what the cost model says of every measured row of ``ours pure``."""
    rows = []
    for result in results:
        workload = WORKLOADS[result["workload"]].with_batch(result.get("batch"))
        for row in result["rows"]:
            if row["contestant"].startswith("ours pure"):
                mesh = (int(row["mesh"][0]), int(row["mesh"][1]))
                found = predict(workload, mesh, reshard=row["contestant"].endswith("Z3"), chip=chip)
                counted = sum(entry["exposed ms"] for entry in row["communication"].values())
                traced = row.get("exposed ms")
                rows.append(
                    {
                        "gpus": result["world_size"], "layout": row["layout"], "contestant": row["contestant"],
                        "overhead %": row["overhead %"], "predicted %": found.overhead_ratio * 100,
                        "update ms": row["update ms"], "predicted update": found.update_s * 1e3,
                        "exposed ms": counted if traced is None else traced["whole"],
                        "predicted exposed": found.exposed_s * 1e3,
                        "resident GiB": row["resident GiB"], "predicted resident": found.resident_bytes / 2**30,
                    }
                )  # fmt: skip
    return rows


def plot(results: Sequence[Result], path: Path, chip: str | None = None) -> None:
    """Draw every contestant of ours on every kind of layout; dashed is what the cost model says, where it can."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    device = results[0]["device"]
    figures = find_chip(chip) if chip is not None else CHIPS.get(chip_key(device))
    figure, (axes, below) = pyplot.subplots(2, figsize=(10, 8), sharex=True, layout="constrained")
    measured = [row | {"gpus": result["world_size"]} for result in results for row in result["rows"]]
    colors: dict[str, str] = {}
    for name, points in _series([row for row in measured if row["contestant"].startswith("ours")], "overhead %"):
        colors[name] = f"C{len(colors)}"
        axes.plot(*zip(*points, strict=True), "o-", color=colors[name], label=name)
    if figures is not None:
        predictions = predicted_rows(results, figures)
        if predictions:
            print_table(tuple(predictions[0]), [list(row.values()) for row in predictions])
        for name, points in _series(predictions, "predicted %"):
            axes.plot(*zip(*points, strict=True), "x--", color=colors.get(name), label=f"{name}, predicted")
    _plot_exposed(below, measured, colors)
    worlds = sorted({int(result["world_size"]) for result in results})
    axes.set(xscale="log", ylabel="% of AdamW's step")
    below.set(xlabel="GPUs" if device != "cpu" else "processes on one CPU", ylabel="% of the step")
    below.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.set_title(f"Step overhead over AdamW on the same mesh: {results[0]['workload']}, {device}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"written: {path}")


def _plot_exposed(axes: Axes, measured: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> None:
    """Draw what the passes expose: traced of everyone where steps were traced, else what ours counted of itself."""
    for how, style in (("traced", "o-"), ("counted", "s:")):
        shares = [(row, *exposed_share(row, "passes")) for row in measured]
        rows = [row | {"exposed %": share * 100} for row, share, by in shares if by == how and share is not None]
        shades = itertools.cycle(("black", "dimgray", "darkgray", "saddlebrown", "peru"))
        for name, points in _series(rows, "exposed %"):
            if name in colors:
                axes.plot(*zip(*points, strict=True), style, color=colors[name])
            else:
                axes.plot(*zip(*points, strict=True), "^-", color=next(shades), label=f"{name}, exposed")
    axes.axhline(EXPOSED_SHARE * 100, color="black", linewidth=0.8, linestyle="--")
    axes.set_title(
        "Exposed communication of forward and backward: traced (squares: counted; dashed: at most)", fontsize=9
    )
    axes.grid(alpha=0.3)


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return points (GPUs, value) by contestant and kind of layout."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row[key] is not None:
            kind = {"r": "", "1": ", 1-D"}.get(row["layout"][0], ", with replicas")
            found.setdefault(f"{row['contestant']}{kind}", []).append((int(row["gpus"]), float(row[key])))
    return list(found.items())


def compare_losses(results: Sequence[Result]) -> int:
    """Print the losses of the fixed batch of every layout and world; return 1 where two differ, else 0."""
    tolerance = LOSS_TOLERANCE["cpu" if results[0]["device"] == "cpu" else "cuda"]
    first: list[float] = next(iter(results[0]["same_batch_losses"].values()))
    rows, worst = [], 0.0
    for result in results:
        for layout, losses in result["same_batch_losses"].items():
            apart = max(abs(a - b) / b for a, b in zip(losses, first, strict=True))
            worst = max(worst, apart)
            rows.append((result["world_size"], layout, *losses, f"{apart:.2e}"))
    print_table(("gpus", "layout", *(f"loss {step + 1}" for step in range(len(first))), "difference"), rows)
    print(f"largest relative difference {worst:.2e}; at most {tolerance:g} is allowed")
    return int(worst > tolerance)
