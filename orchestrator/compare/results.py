"""Results as tables: for the terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.compare.run import Document, Point, VariantResult

__all__ = ["Comparison", "final_loss", "render_comparison", "smoothed", "write_csv"]

_MAX_ROWS = 12
_SHARE = 20
"""The last loss is a mean over a twentieth of the steps: single batches differ by more than optimizers do."""


class Comparison(Document):
    """All runs, in the order in which they ran."""

    variants: tuple[VariantResult, ...]
    differences: tuple[str, ...] = ()
    """Settings of data, seed and batch in which the runs differ; losses are not comparable then."""


def window(points: Sequence[Point]) -> int:
    """Return over how many steps losses are averaged: a twentieth of them, at least one."""
    return max(1, len(points) // _SHARE)


def smoothed(points: Sequence[Point]) -> list[float]:
    """Return for each point the mean loss of the :func:`window` of steps that it ends; fewer at the beginning."""
    size, losses = window(points), [point.loss for point in points]
    return [
        math.fsum(part) / len(part) for end in range(1, len(losses) + 1) if (part := losses[max(0, end - size) : end])
    ]


def final_loss(result: VariantResult) -> float | None:
    """Return the mean loss of the last steps."""
    return smoothed(result.points)[-1] if result.points else None


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write a line for each step of each variant, tokens and seconds being those so far."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", *Point.model_fields])
        for result in comparison.variants:
            writer.writerows([result.name, *point.model_dump().values()] for point in result.points)


def render_comparison(comparison: Comparison) -> RenderableType:
    """Return one line for each run, and losses by step, tokens and seconds side by side."""
    warnings = [Text(f"not the same data: {text}", style="yellow") for text in comparison.differences]
    return Group(_summary(comparison), _losses(comparison), *warnings)


def _summary(comparison: Comparison) -> Table:
    table = _table(
        "Runs", "run", "optimizer", "workers", "kernel", "steps", "tokens", "seconds", "tokens/s", "loss", "end"
    )
    for result in comparison.variants:
        cells = [result.name, result.spec.optimizer.kind, str(result.spec.world_size), ", ".join(result.kernels) or "-"]
        loss = final_loss(result)
        if loss is None:
            cells += ["0", "0", "-", "-", "-"]
        else:
            last = result.points[-1]
            speed = f"{last.tokens / last.seconds:.0f}" if last.seconds > 0 else "-"
            cells += [str(last.step), str(last.tokens), f"{last.seconds:.1f}", speed, f"{loss:.4f}"]
        table.add_row(*cells, result.end)
    table.caption = f"loss: mean of the last {100 // _SHARE} % of the steps, nats a token; seconds: in steps, on rank 0"
    table.caption_justify = "left"
    return table


def _losses(comparison: Comparison) -> Table:
    """Means over a window, at steps that all runs with points have where there are such."""
    shown = [result for result in comparison.variants if result.points]
    heads = [text for result in shown for text in (f"{result.name} loss", f"{result.name} s")]
    table = _table("Loss by step, tokens and seconds", "step", "tokens", *heads)
    by_step = [
        {point.step: (point, mean) for point, mean in zip(result.points, smoothed(result.points), strict=True)}
        for result in shown
    ]
    for step in _steps(sorted(set().union(*by_step))):
        found = [points.get(step) for points in by_step]
        tokens = {str(pair[0].tokens) for pair in found if pair is not None}
        cells = [text for pair in found for text in _cells(pair)]
        table.add_row(str(step), " / ".join(sorted(tokens)), *cells)
    return table


def _cells(pair: tuple[Point, float] | None) -> tuple[str, str]:
    return ("-", "-") if pair is None else (f"{pair[1]:.4f}", f"{pair[0].seconds:.1f}")


def _steps(steps: Sequence[int]) -> list[int]:
    """Return the first, the last and some between them, evenly spread."""
    if len(steps) <= _MAX_ROWS:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (_MAX_ROWS - 1))] for index in range(_MAX_ROWS)]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table
