"""The store: every row and every SQL statement of the control plane.

``database`` opens it, ``models`` names its rows, ``transitions`` holds the one function that changes a job's state.
"""

from __future__ import annotations

__all__: list[str] = []
