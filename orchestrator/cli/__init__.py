"""``dmuonctl``: 0 means that the job succeeded, 1 that something failed, 2 that the input is wrong."""

from __future__ import annotations

from orchestrator.cli.app import app, main

__all__ = ["app", "main"]
