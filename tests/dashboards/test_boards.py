"""The generated files: structure, and every metric and label of every query in the catalogue."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dashboards.__main__ import GENERATED, generated_files, main
from dashboards.boards import BOARDS
from dashboards.build import render
from dashboards.panels import Board, PanelSpec, Query
from dashboards.rule_files import alert_routes
from dashboards.rules import ALERTS, RECORDINGS
from tests.architecture.source import ROOT
from worker.contract.metrics import CATALOGUE, Metric
from worker.contract.spec import BreakerSpec

METRICS = {entry.name: entry for entry in CATALOGUE}
SUFFIX = re.compile(r"_(bucket|sum|count)$")
NAME = re.compile(r"(?<![\w:])dmuon_[a-z0-9_]+")
RECORDED = {rule.record for rule in RECORDINGS}
PROMETHEUS_OWN = {"up": {"job"}, "scrape_duration_seconds": {"job"}, "ALERTS": {"alertstate", "job"}}
"""What Prometheus itself provides."""
RESULTS_OF_ONE_LOOK = {"dmuon_skipped_steps_total", "dmuon_job_attempts_total", "dmuon_queue_wait_seconds_bucket"}
"""Counters that are read as they stand: totals that a person counts."""


def queries() -> list[tuple[str, str]]:
    found = [(f"{b.uid}: {p.title}", q.expr) for b in BOARDS for p in b.panels for q in p.queries]
    found += [(f"{b.uid}: mark {a.name}", a.expr) for b in BOARDS for a in b.annotations]
    found += [(rule.record, rule.expr) for rule in RECORDINGS]
    return found + [(alert.name, alert.expr) for alert in ALERTS]


def family(name: str) -> Metric:
    found = METRICS.get(name) or METRICS.get(SUFFIX.sub("", name))
    assert found is not None, f"{name} is not in the catalogue"
    return found


@pytest.mark.parametrize(("where", "expr"), queries())
def test_queries_use_the_catalogue(where: str, expr: str) -> None:
    for recorded in re.findall(r"\b\w+:\w+:\w+", expr):
        assert recorded in RECORDED, f"{where}: nobody records {recorded}"
    own = {name: labels for name, labels in PROMETHEUS_OWN.items() if re.search(rf"\b{name}\b", expr)}
    names = NAME.findall(re.sub(r"\b\w+:\w+:\w+", "", expr))
    assert names or own or re.search(r"\w+:\w+:\w+", expr), where
    used = {family(name).name: family(name) for name in names}
    labels = {label for entry in used.values() for label in entry.labels} | {"le"}
    labels |= {label for known in own.values() for label in known}
    if re.search(r"\w+:\w+:\w+", expr):
        labels |= {"job", "route", "phase"}
    groups = re.findall(r"(?:by|on|group_left|group_right) \(([^)]*)\)", expr)
    grouped = {label.strip() for group in groups for label in group.split(",")} - {""}
    matched = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expr))
    assert grouped | matched <= labels, f"{where}: {(grouped | matched) - labels} are no labels of {sorted(used)}"


@pytest.mark.parametrize(("where", "expr"), queries())
def test_counters_are_rated_and_gauges_are_not(where: str, expr: str) -> None:
    for name in NAME.findall(re.sub(r"\b\w+:\w+:\w+", "", expr)):
        rated = re.search(rf"(rate|increase|changes)\(\s*{name}\b", expr) is not None
        if family(name).kind == "gauge":
            assert not rated or "changes(" in expr, f"{where}: rate() of the gauge {name}"
        elif name not in RESULTS_OF_ONE_LOOK and not re.search(rf"\({name} / \(", expr):
            averaged = f"({SUFFIX.sub('_sum', name)} / ({SUFFIX.sub('_count', name)} > 0))"
            assert rated or averaged in expr, f"{where}: {name} only grows; its rate is what can be read"


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.uid)
def test_structure(board: Board) -> None:
    document: dict[str, Any] = json.loads((GENERATED / "grafana" / f"{board.uid}.json").read_text())
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
            assert panel["fieldConfig"]["defaults"]["unit"] and panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    marks = {entry["name"] for entry in document["annotations"].get("list", [])}
    assert marks == {mark.name for mark in board.annotations}


@pytest.mark.parametrize("board", BOARDS, ids=lambda b: b.uid)
def test_a_bound_is_drawn_and_red_begins_there(board: Board) -> None:
    document: dict[str, Any] = json.loads((GENERATED / "grafana" / f"{board.uid}.json").read_text())
    panels = {panel["title"]: panel for panel in document["panels"]}
    bounded = [spec for spec in board.panels if spec.has_bound]
    assert bounded, "some number on each board says that it is bad"
    for spec in board.panels:
        defaults = panels[spec.title]["fieldConfig"]["defaults"]
        colors = {step["value"]: step["color"] for step in defaults["thresholds"]["steps"]}
        expected: dict[float | None, str] = {None: "green"}
        expected |= {} if spec.warn_below is None else {None: "red", spec.warn_below: "green"}
        assert colors == expected | ({} if spec.warn_above is None else {spec.warn_above: "red"}), spec.title
        drawn = defaults.get("custom", {}).get("thresholdsStyle", {}).get("mode", "off")
        assert (drawn != "off") == (spec.has_bound and spec.kind == "timeseries"), spec.title


def test_overlap_is_the_first_thing_one_sees_and_the_worst_owner_has_a_name() -> None:
    board = next(board for board in BOARDS if board.uid == "dmuon-runtime")
    assert [panel.title for panel in board.panels[:2]] == ["Overlap by route", "Overlap by route and phase"]
    document: dict[str, Any] = json.loads((GENERATED / "grafana" / "dmuon-runtime.json").read_text())
    panels = {panel["title"]: panel for panel in document["panels"] if panel["type"] != "row"}
    assert [next(iter(panels))] == ["Overlap by route"] and panels["Overlap by route"]["gridPos"]["y"] <= 1
    for what in ("measured", "planned"):
        worst = panels[f"Worst owner, {what}"]
        assert worst["options"]["textMode"] == "value_and_name"
        assert [(t["legendFormat"], t["expr"][:7]) for t in worst["targets"]] == [("rank {{rank}}", "topk(1,")]


def test_every_metric_is_looked_at_somewhere() -> None:
    text = " ".join(expr for _, expr in queries())
    unseen = [entry.name for entry in CATALOGUE if not re.search(rf"\b{entry.name}(_bucket|_sum|_count)?\b", text)]
    assert not unseen


def test_uids_are_those_that_links_know() -> None:
    assert [board.uid for board in BOARDS] == ["dmuon-fleet", "dmuon-job", "dmuon-runtime", "dmuon-control-plane"]


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err
    assert all(path.read_text() == text for path, text in generated_files().items())
    assert [render(board) for board in BOARDS] == [render(board) for board in BOARDS]


def test_check_names_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dashboards.__main__.GENERATED", tmp_path)
    assert main([]) == 0 and main(["--check"]) == 0
    (tmp_path / "prometheus" / "dmuon.rules.yml").write_text("groups: []\n")
    (tmp_path / "grafana" / "old.json").write_text("{}")
    assert main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "dmuon.rules.yml" in said and "old.json" in said and "make dashboards" in said
    assert main([]) == 0 and main(["--check"]) == 0 and not (tmp_path / "grafana" / "old.json").exists()


def test_a_panel_without_a_query_is_refused() -> None:
    with pytest.raises(ValueError, match="no query"):
        PanelSpec(title="t", question="q", when_red="w", queries=())
    with pytest.raises(ValueError, match="width is 25"):
        PanelSpec(title="t", question="q", when_red="w", queries=(Query("dmuon_loss", ""),), width=25)


def test_every_alert_is_in_the_runbook_and_nothing_else_is() -> None:
    text = (ROOT / "docs" / "operate.md").read_text()
    headings = set(re.findall(r"^### (DMuon\w+)$", text, re.MULTILINE))
    assert headings == {alert.name for alert in ALERTS}


def test_the_guide_states_the_bounds_of_a_breaker_that_hold() -> None:
    text, bounds = (ROOT / "docs" / "operate.md").read_text(), BreakerSpec()
    assert f"**{bounds.check_every_calls} steps**" in text
    assert f"within {bounds.check_every_calls * bounds.minimum_calls} steps by default" in text


def test_every_alert_has_a_route() -> None:
    for severity in {alert.severity for alert in ALERTS}:
        assert f"receiver: {severity}" in alert_routes()


def test_rules_fire_and_stay_silent_as_they_should() -> None:
    """promtool's own unit tests: what each rule computes, and what each alert says of ill and of healthy series."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    here = Path(__file__).parent / "rules"
    done = subprocess.run(
        ["promtool", "test", "rules", *map(str, sorted(here.glob("*.yml")))], capture_output=True, text=True, cwd=here
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = "".join(path.read_text() for path in here.glob("*.yml"))
    untested = [alert.name for alert in ALERTS if f"alertname: {alert.name}" not in tested]
    untested += [rule.record for rule in RECORDINGS if rule.record not in tested]
    assert not untested
