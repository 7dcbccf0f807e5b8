"""The environment variables of the runtime."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path

__all__ = ["cache_directory", "keep_compiled_kernels", "kernel_from_environment", "onednn_limit"]


@lru_cache(maxsize=1)
def kernel_from_environment() -> str | None:
    """Return ``DMUON_NS_KERNEL``, read once; None when unset or empty. It counts only where a kernel is ``auto``."""
    return os.environ.get("DMUON_NS_KERNEL", "").strip().lower() or None


def onednn_limit() -> str | None:
    """Return the newest instructions that oneDNN may use, by its own ``ONEDNN_MAX_CPU_ISA``; None where it may use all.

    torch does not know of that limit: it names bfloat16 units that its products then do not use.
    """
    value = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return value.strip().upper() or None


def cache_directory() -> Path:
    """Return where measured choices are kept: ``DMUON_CACHE_DIR``, else ``~/.cache/dmuon``.

    A user without a home (a container's arbitrary number) gets a place of its own in the temporary directory.
    """
    named = os.environ.get("DMUON_CACHE_DIR", "").strip()
    try:
        return Path(named) if named else Path("~/.cache/dmuon").expanduser()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"dmuon-{os.getuid()}"


def keep_compiled_kernels() -> None:
    """Have quack keep what it compiles beside the measured choices; to be called before quack is imported.

    Its own default is the temporary directory, which a new container or a restart of the machine empties, and ten
    seconds a kernel are spent again. ``QUACK_CACHE_DIR`` names another place; where nothing can be written, its default
    stays.
    """
    if os.environ.get("QUACK_CACHE_DIR"):
        return
    directory = cache_directory() / "quack"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(directory, os.W_OK):
        os.environ["QUACK_CACHE_DIR"] = str(directory)
