"""The panels in plain words, for ``docs/operate.md`` to point at."""

from __future__ import annotations

from dashboards.boards import BOARDS
from dashboards.panels import Board, PanelSpec

__all__ = ["panel_guide"]

_HEADER = """<!-- Written by `python -m dashboards`; change dashboards/boards instead. -->
# What each panel means

Every panel carries this text as its description. Marks on the time axis: blue is another attempt, orange a change of
kernels, red an alert of the job.
"""


def panel_guide() -> str:
    """Return all boards and panels as Markdown."""
    return "\n".join([_HEADER, *map(_board, BOARDS)])


def _board(board: Board) -> str:
    lines = [f"## {board.title}", "", f"{board.description} (uid `{board.uid}`)", ""]
    for row in board.rows:
        lines += [f"### {row.title}", ""]
        lines += [_panel(panel) for panel in row.panels]
        lines.append("")
    return "\n".join(lines)


def _panel(panel: PanelSpec) -> str:
    empty = f" Empty until {panel.filled_by}." if panel.filled_by else ""
    return f"- **{panel.title}**. {panel.question} *When it is bad:* {panel.when_red}{empty}"
