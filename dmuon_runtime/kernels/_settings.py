"""The one environment variable of the runtime."""

from __future__ import annotations

import os
from functools import lru_cache

__all__ = ["kernel_from_environment"]


@lru_cache(maxsize=1)
def kernel_from_environment() -> str | None:
    """Return ``DMUON_NS_KERNEL``, read once; None when unset or empty. It counts only where a kernel is ``auto``."""
    return os.environ.get("DMUON_NS_KERNEL", "").strip().lower() or None
