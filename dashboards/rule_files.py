"""Turns rules into the files that Prometheus and Alertmanager load."""

from __future__ import annotations

from typing import Any

import yaml

from dashboards.rules import ALERTS, RECORDINGS, Alert

__all__ = ["RUNBOOK", "alert_routes", "rule_file"]

RUNBOOK = "docs/operate.md"
_ROUTE = {
    "receiver": "ticket",
    "group_by": ["alertname", "job"],
    "group_wait": "30s",
    "group_interval": "5m",
    "repeat_interval": "12h",
    "routes": [{"matchers": ['severity="page"'], "receiver": "page", "group_wait": "5s", "repeat_interval": "1h"}],
}
_INHIBITIONS = [
    {
        "source_matchers": ['alertname="DMuonExporterDown"'],
        "target_matchers": ['alertname=~"DMuon.+"', 'alertname!="DMuonExporterDown"'],
    },
    {
        "source_matchers": ['alertname="DMuonRoutesNotVerified"'],
        "target_matchers": ['alertname="DMuonNSNotRunning"'],
        "equal": ["job"],
    },
]
_HEADER = "# Written by `python -m dashboards`; change dashboards/rules.py instead.\n"


def rule_file() -> str:
    """Return the rule file of Prometheus: recordings first, since alerts read them."""
    recordings = [{"record": rule.record, "expr": rule.expr} for rule in RECORDINGS]
    groups = [
        {"name": "dmuon-recordings", "rules": recordings},
        {"name": "dmuon-alerts", "rules": [_alert(alert) for alert in ALERTS]},
    ]
    return _dump({"groups": groups})


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook": f"{RUNBOOK}#{alert.name.lower()}",
        },
    }


def alert_routes() -> str:
    """Return Alertmanager's configuration: pages at once and again soon, tickets gathered; one alert a cause.

    The receivers hold no address, since whom to wake is the installation's own: add yours to both. Until then alerts
    are seen in Alertmanager, in Grafana and on the boards.
    """
    receivers = [{"name": "page"}, {"name": "ticket"}]
    return _dump({"route": _ROUTE, "inhibit_rules": _INHIBITIONS, "receivers": receivers})


def _dump(document: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)
    return _HEADER + text
