"""A service of one's own: brought up as a child process, taken down with everything that it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from orchestrator.client import Client
from orchestrator.errors import RequestRefused, ServiceUnreachable
from orchestrator.processes import end_processes, free_port
from orchestrator.ray_process import live_ray, stop_ray
from orchestrator.settings import Settings, child_environment

__all__ = ["OwnService"]

_UP_S = 120.0


class OwnService:
    """``dmuonctl up`` on a free port, as a child, with its state in ``state_dir``; a context manager.

    Entering waits until the service answers. Leaving ends it and its Ray and looks for processes that they left,
    whose ids are then in :attr:`left`.
    """

    def __init__(self, state_dir: Path, *, num_cpus: int | None = None, extra: dict[str, str] | None = None) -> None:
        self.settings = Settings(state_dir=state_dir, port=free_port())
        self.log = state_dir / "server.log"
        self.left: list[int] = []
        self._num_cpus = num_cpus
        self._extra = extra or {}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.settings.host}:{self.settings.port}"

    @property
    def token(self) -> str:
        """Its bearer token."""
        return self.settings.token_file.read_text().split()[0]

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._child is not None, "not started"
        return self._child.pid

    def client(self, *, timeout_s: float = 30.0) -> Client:
        """Return a client of it."""
        return Client(self.url, self.token, timeout_s=timeout_s)

    def start(self) -> None:
        """Start the server (Ray too, unless it lives) and wait until it answers.

        Raises:
            ServiceUnreachable: it ended, or did not answer in time.
        """
        words = [sys.executable, "-m", "orchestrator", "up", "--port", str(self.settings.port)]
        words += [] if self._num_cpus is None else ["--num-cpus", str(self._num_cpus)]
        environment = child_environment({**self._extra, "DMUON_STATE_DIR": str(self.settings.state_dir)})
        with self.log.open("ab") as output:
            self._child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment,
            )  # fmt: skip
        self._wait_until_up()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.take_down()

    def take_down(self) -> None:
        """End everything that was started and note what is left."""
        child = self._child
        ray = live_ray(self.settings)
        leaders = ({child.pid} if child else set()) | ({ray.pid} if ray is not None else set())
        if child is not None:
            if child.poll() is None:
                server = psutil.Process(child.pid)
                end_processes(server, server.children(recursive=True), patience_s=15.0)
            child.wait(10.0)
        stop_ray(self.settings)
        self.left = _alive_in_sessions(leaders)

    def log_tail(self, limit: int = 4000) -> str:
        """Return the end of the server's log."""
        return self.log.read_text(errors="replace")[-limit:] if self.log.exists() else ""

    def _wait_until_up(self) -> None:
        assert self._child is not None
        deadline = time.monotonic() + _UP_S
        while time.monotonic() < deadline:
            if self._child.poll() is not None:
                raise ServiceUnreachable(f"the service ended with code {self._child.returncode} while it started")
            if self.settings.token_file.exists() and self._answers():
                return
            time.sleep(0.2)
        raise ServiceUnreachable(f"the service did not come up within {_UP_S:g} s")

    def _answers(self) -> bool:
        words = self.settings.token_file.read_text().split()
        try:
            with Client(self.url, words[0] if words else None, timeout_s=5.0) as client:
                client.jobs(page_size=1)
        except (ServiceUnreachable, RequestRefused):
            return False
        return True


def _alive_in_sessions(leaders: set[int]) -> list[int]:
    """Return the ids of living processes whose session one of ``leaders`` leads."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) in leaders and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found
