"""The environment variables of the runtime."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

__all__ = ["cache_directory", "kernel_from_environment"]


@lru_cache(maxsize=1)
def kernel_from_environment() -> str | None:
    """Return ``DMUON_NS_KERNEL``, read once; None when unset or empty. It counts only where a kernel is ``auto``."""
    return os.environ.get("DMUON_NS_KERNEL", "").strip().lower() or None


def cache_directory() -> Path:
    """Return where measured choices are kept: ``DMUON_CACHE_DIR``, else ``~/.cache/dmuon``."""
    named = os.environ.get("DMUON_CACHE_DIR", "").strip()
    return Path(named) if named else Path("~/.cache/dmuon").expanduser()
