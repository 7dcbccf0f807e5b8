"""Grafana dashboards and alert rules as code, with their generated files."""
