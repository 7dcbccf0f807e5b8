"""Bringing what runs and what is stored together: ``decide`` decides on values, ``loop`` does.

The control plane's ignorance changes nothing: a job is lost only on positive evidence.
"""

from __future__ import annotations

__all__: list[str] = []
