"""What a panel is: a question, the queries that answer it, and what to do when the answer is bad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Annotation", "Board", "PanelSpec", "Query", "RowSpec"]

Kind = Literal["timeseries", "stat", "bargauge"]


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelSpec:
    """One panel. ``filled_by`` names the event without which its queries return nothing."""

    title: str
    question: str
    """Which question the panel answers."""
    when_red: str
    """What to do when the answer is bad."""
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    minimum: float | None = None
    maximum: float | None = None
    warn_above: float | None = None
    warn_below: float | None = None
    named: bool = False
    """True shows the legend beside the value of a stat: who it is, not only how much."""
    filled_by: str | None = None

    @property
    def has_bound(self) -> bool:
        """True where a number, and not its course, says that it is bad."""
        return self.warn_above is not None or self.warn_below is not None

    def __post_init__(self) -> None:
        if not self.queries:
            raise ValueError(f"panel {self.title!r} has no query")
        if not 1 <= self.width <= 24:
            raise ValueError(f"panel {self.title!r}: width is {self.width}, expected 1 to 24 grid columns")


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A titled row of panels."""

    title: str
    panels: tuple[PanelSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Marks on the time axis of a board, where ``expr`` has a value. ``filled_by`` names what makes one."""

    name: str
    expr: str
    color: str
    filled_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard. ``uid`` never changes: links and provisioning depend on it."""

    uid: str
    title: str
    description: str
    rows: tuple[RowSpec, ...]
    by_job: bool
    """True adds the variable ``job``."""
    annotations: tuple[Annotation, ...] = ()

    @property
    def panels(self) -> tuple[PanelSpec, ...]:
        """All panels, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)
