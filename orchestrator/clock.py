"""Time as a value that is passed in, so that tests move it by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock", "wall_clock"]

Clock = Callable[[], float]
"""Returns seconds since the epoch."""

wall_clock: Clock = time.time
