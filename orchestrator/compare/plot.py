"""Losses as a picture. matplotlib is imported when a picture is drawn, and by nothing else."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.compare.results import Comparison, smoothed, window
from orchestrator.compare.run import Point, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["can_plot", "plot_comparison"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which colour-blind readers tell apart; the dashes say the same again."""
_DASHES = ("-", "--", "-.", ":")
_INK, _FAINT = "#222222", "#dddddd"
_GAP = 0.055
"""Least distance of two labels, as a share of the height."""
_ROOM = 1.01
"""Width of a panel as a multiple of the longest line."""
Pick = Callable[[Point], float]


def can_plot() -> bool:
    """Tell whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Write a PNG: loss against steps (and tokens, on an axis above) and against seconds.

    Where the runs differ in tokens a step, tokens have a panel of their own.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [result for result in comparison.variants if result.points]
    rates = {point.tokens / point.step for result in shown for point in result.points}
    panels: list[tuple[str, Pick]] = [("steps", lambda point: point.step), ("seconds in steps", lambda p: p.seconds)]
    if len(rates) > 1:
        panels.insert(1, ("tokens read", lambda point: point.tokens))
    figure = Figure(figsize=(6.4 * len(panels), 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Sequence[Axes] = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (label, pick) in zip(axes, panels, strict=True):
        _draw(axis, shown, pick)
        axis.set_xlabel(label)
    if len(rates) == 1:
        above = axes[0].secondary_xaxis("top", functions=_there_and_back(rates.pop()))
        above.set_xlabel("tokens read", color=_INK)
        above.spines["top"].set_visible(False)
        above.xaxis.set_major_formatter("{x:,.0f}")
    axes[0].set_ylabel(f"loss (nats a token), {_mean_of(shown)}")
    same = "Loss on the same data" if not comparison.differences else f"Loss; {comparison.differences[0]}"
    figure.suptitle(same, color=_INK, fontsize=13)
    figure.savefig(path)


def _there_and_back(rate: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return steps to tokens and its inverse, over matplotlib's arrays."""
    return (lambda steps: steps * rate), (lambda tokens: tokens / rate)


def _mean_of(shown: Sequence[VariantResult]) -> str:
    size = max((window(result.points) for result in shown), default=1)
    return "each batch" if size == 1 else f"mean of {size} steps"


def _draw(axis: Axes, shown: Sequence[VariantResult], pick: Pick) -> None:
    ends: list[tuple[float, float]] = []
    for index, result in enumerate(shown):
        colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
        xs, means = [pick(point) for point in result.points], smoothed(result.points)
        axis.plot(xs, [point.loss for point in result.points], color=colour, alpha=0.18, linewidth=0.8)
        axis.plot(xs, means, color=colour, linestyle=dash, linewidth=2.0)
        axis.plot(xs[-1:], means[-1:], "o", color=colour, markersize=5)
        ends.append((xs[-1], means[-1]))
    axis.grid(color=_FAINT, linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(colors=_INK)
    axis.xaxis.set_major_formatter("{x:,.0f}" if max(x for x, _ in ends) >= 10 else "{x:g}")
    axis.set_xlim(0, _ROOM * max(x for x, _ in ends))
    _label(axis, [result.name for result in shown], ends)


def _label(axis: Axes, names: Sequence[str], ends: Sequence[tuple[float, float]]) -> None:
    """Write each name at the right edge, tied to the end of its line, no two on top of each other."""
    bottom, top = axis.get_ylim()
    height = -math.inf
    for index in sorted(range(len(ends)), key=lambda each: ends[each][1]):
        x, y = ends[index]
        height = max(y, height + _GAP * (top - bottom))
        colour = _COLOURS[index % len(_COLOURS)]
        axis.annotate(
            names[index],
            (x, y),
            (1.03, (height - bottom) / (top - bottom)),
            textcoords="axes fraction",
            va="center",
            color=colour,
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": colour, "linestyle": ":", "linewidth": 0.9, "relpos": (0, 0.5)},
            annotation_clip=False,
        )
