"""The four dashboards."""

from __future__ import annotations

from dashboards.boards.control_plane import CONTROL_PLANE
from dashboards.boards.dmuon import DMUON
from dashboards.boards.fleet import FLEET
from dashboards.boards.job import JOB_BOARD

__all__ = ["BOARDS"]

BOARDS = (FLEET, JOB_BOARD, DMUON, CONTROL_PLANE)
