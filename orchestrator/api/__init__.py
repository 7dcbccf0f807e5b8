"""The HTTP side: ``app`` puts it together, one module a group of routes."""

from __future__ import annotations

__all__: list[str] = []
