"""The generated dashboards: structure, and every metric and label of every query in the catalogue."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dashboards.__main__ import BOARDS, GENERATED
from dashboards.build import render
from dashboards.panels import Board, PanelSpec, Query
from worker.contract.metrics import CATALOGUE, Metric

METRICS = {entry.name: entry for entry in CATALOGUE}
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def queries() -> list[tuple[str, str]]:
    return [(f"{b.uid}: {p.title}", q.expr) for b in BOARDS for p in b.panels for q in p.queries]


def family(name: str) -> Metric:
    found = METRICS.get(name) or METRICS.get(SUFFIX.sub("", name))
    assert found is not None, f"{name} is not in the catalogue"
    return found


@pytest.mark.parametrize(("where", "expr"), queries())
def test_queries_use_the_catalogue(where: str, expr: str) -> None:
    names = re.findall(r"\bdmuon_[a-z0-9_]+", expr)
    assert names, where
    used = {family(name).name: family(name) for name in names}
    labels = {label for entry in used.values() for label in entry.labels} | {"le"}
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(",")}
    matched = set(re.findall(r"[{,]\s*(\w+)\s*=", expr))
    assert grouped | matched <= labels, f"{where}: {(grouped | matched) - labels} are no labels of {sorted(used)}"


@pytest.mark.parametrize(("where", "expr"), queries())
def test_counters_are_rated_and_gauges_are_not(where: str, expr: str) -> None:
    for name in re.findall(r"\bdmuon_[a-z0-9_]+", expr):
        rated = re.search(rf"rate\(\s*{name}\b", expr) is not None
        if family(name).kind == "gauge":
            assert not rated, f"{where}: rate() of the gauge {name}"
        elif "skipped" not in name:
            assert rated, f"{where}: {name} only grows; its rate is what can be read"


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.uid)
def test_structure(board: Board) -> None:
    document: dict[str, Any] = json.loads((GENERATED / f"{board.uid}.json").read_text())
    assert document["uid"] == board.uid and document["schemaVersion"] >= 36 and not document["editable"]
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids)) and all(ids)
    cells: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        grid = panel["gridPos"]
        own = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert grid["x"] + grid["w"] <= 24 and not own & cells, f"{panel['title']} overlaps another panel"
        cells |= own
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", "a literal datasource would work on one Grafana only"
            assert "When it is bad" in panel["description"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.uid)
def test_generated_files_are_current(board: Board) -> None:
    assert (GENERATED / f"{board.uid}.json").read_text() == render(board) == render(board)


def test_a_panel_without_a_query_is_refused() -> None:
    with pytest.raises(ValueError, match="no query"):
        PanelSpec(title="t", question="q", when_red="w", queries=())
    with pytest.raises(ValueError, match="width is 25"):
        PanelSpec(title="t", question="q", when_red="w", queries=(Query("dmuon_loss", ""),), width=25)
