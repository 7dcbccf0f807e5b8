"""Keeping Ray up: when the Ray that this service started has died, another one is started in its place.

The old one's processes are ended before that, so what ran on it is known to be gone: its supervisors are not found on
the new one, and their jobs continue from their checkpoints.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from orchestrator.errors import RayProcessError
from orchestrator.ray_process import is_whole, start_ray
from orchestrator.settings import Settings

__all__ = ["RayKeeper"]

_log = logging.getLogger(__name__)
_RETRY_S = (5.0, 10.0, 30.0, 60.0)


class RayKeeper:
    """Looks after the Ray of a state directory, in a thread of its own.

    Args:
        num_cpus: what a new one offers; None offers all of the machine's.
        moved: called with the address of a new one.
        interval_s: between two looks; it must be found broken twice in a row.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        num_cpus: int | None,
        moved: Sequence[Callable[[str], None]],
        interval_s: float = 1.5,
    ) -> None:
        self._settings, self._num_cpus, self._moved, self._interval_s = settings, num_cpus, tuple(moved), interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-keeper", daemon=True)
        self.restarts = 0
        """How often a new one was started."""

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking; a Ray that is just being started is left to come up."""
        self._stop.set()

    def _run(self) -> None:
        broken, failures = 0, 0
        while not self._stop.wait(self._interval_s):
            broken = 0 if is_whole(self._settings) else broken + 1
            if broken < 2:
                continue
            broken = 0
            _log.warning("Ray has died; another one is started in its place")
            try:
                self._renew()
            except RayProcessError as error:
                pause_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
                failures += 1
                _log.error("Ray cannot be started, again in %g s: %s", pause_s, error)
                self._stop.wait(pause_s)
            except Exception:
                _log.exception("looking after Ray failed; the next look tries again")
            else:
                failures = 0

    def _renew(self) -> None:
        record = start_ray(self._settings, num_cpus=self._num_cpus)
        self.restarts += 1
        _log.warning("Ray runs again, at %s", record.address)
        for tell in self._moved:
            tell(record.address)
