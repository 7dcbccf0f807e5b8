"""Turns a :class:`~dashboards.panels.Board` into the JSON that Grafana loads."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import GraphThresholdsStyleConfig, ReduceDataOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueTextMode, GraphTresholdsStyleMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from dashboards.panels import Annotation, Board, PanelSpec

__all__ = ["DATASOURCE", "render"]

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
PANEL_HEIGHT = 8
BUILDERS: dict[str, Any] = {"timeseries": timeseries.Panel, "stat": stat.Panel, "bargauge": bargauge.Panel}


def render(board: Board) -> str:
    """Return the dashboard as JSON text with sorted keys: the same board gives the same bytes."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["dmuon"])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(_link_to_others())
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    if board.by_job:
        builder = builder.with_variable(_job_variable())
    for mark in board.annotations:
        builder = builder.annotation(_annotation(mark))
    next_id = 1
    for row in board.rows:
        builder = builder.with_row(dashboard.Row(row.title).id(next_id))
        next_id += 1
        for spec in row.panels:
            builder = builder.with_panel(_panel(spec, next_id))
            next_id += 1
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(builder.build())
    return text + "\n"


def _link_to_others() -> Any:
    link = dashboard.DashboardLink("DMuon boards").type(DashboardLinkType.DASHBOARDS).tags(["dmuon"])
    return link.as_dropdown(True).include_vars(True).keep_time(True)


def _job_variable() -> Any:
    return (
        dashboard.QueryVariable("job")
        .label("Job")
        .datasource(DATASOURCE)
        .query("label_values(dmuon_job_info, job)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def _annotation(mark: Annotation) -> Any:
    query = dashboard.AnnotationQuery().name(mark.name).datasource(DATASOURCE).enable(True)
    return query.icon_color(mark.color).expr(mark.expr)


def _panel(spec: PanelSpec, panel_id: int) -> Any:
    panel = (
        BUILDERS[spec.kind]()
        .id(panel_id)
        .title(spec.title)
        .description(_description(spec))
        .datasource(DATASOURCE)
        .unit(spec.unit)
        .height(PANEL_HEIGHT)
        .span(spec.width)
        .thresholds(_thresholds(spec))
    )
    if spec.minimum is not None:
        panel = panel.min(spec.minimum)
    if spec.maximum is not None:
        panel = panel.max(spec.maximum)
    if spec.kind == "timeseries" and spec.has_bound:  # of itself Grafana draws none
        style = GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED_AND_AREA)
        panel = panel.thresholds_style(style)
    if spec.kind == "stat":
        # Only what is there now: a state that has passed is a series that ended, and its last value would stay.
        panel = panel.reduce_options(ReduceDataOptions().calcs(["last"]))
        panel = panel.text_mode(BigValueTextMode.VALUE_AND_NAME if spec.named else BigValueTextMode.AUTO)
    for number, query in enumerate(spec.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
        panel = panel.with_target(target.range() if spec.kind == "timeseries" else target.instant())
    return panel


def _description(spec: PanelSpec) -> str:
    parts = [spec.question, f"When it is bad: {spec.when_red}"]
    if spec.filled_by:
        parts.append(f"Empty until {spec.filled_by}.")
    return "\n\n".join(parts)


def _thresholds(spec: PanelSpec) -> Any:
    if spec.warn_below is not None:
        steps = [Threshold(value=None, color="red"), Threshold(value=spec.warn_below, color="green")]
    else:
        steps = [Threshold(value=None, color="green")]
    if spec.warn_above is not None:
        steps.append(Threshold(value=spec.warn_above, color="red"))
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
