"""A real Prometheus with the deployed configuration, scraping a service of the tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from dashboards.__main__ import GENERATED
from orchestrator.cli.own_service import OwnService
from tests.architecture.source import ROOT

__all__ = ["LATER", "NEEDS_GPU", "Prometheus", "running_prometheus"]

LATER = ("dmuon_checkpoint_timestamp_seconds", "dmuon_checkpoint_every_steps")
"""Operands of an alert that only a job with checkpoints has, after its first."""
NEEDS_GPU = ("dmuon_gpu_stray_processes",)
"""Operands of an alert that only a cluster with GPUs has."""


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=10.0)

    def query(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """Evaluate an instant query at a time (seconds since the epoch) or now; fail on an error."""
        params = {"query": expr} | ({} if at is None else {"time": f"{at:.3f}"})
        answer = self._client.get("/api/v1/query", params=params)
        assert answer.status_code == 200, f"{expr}: {answer.text}"
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes."""
        found: list[dict[str, Any]] = self._client.get("/api/v1/targets").json()["data"]["activeTargets"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The groups of rules with what came of their last evaluation."""
        found: list[dict[str, Any]] = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return found

    def ready(self) -> bool:
        """True once it answers."""
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def running_prometheus(service: OwnService, folder: Path) -> Iterator[Prometheus]:
    """Start it on a free port of loopback with ``deploy/prometheus``, only its target and token differing."""
    configuration = folder / "prometheus"
    shutil.copytree(ROOT / "deploy" / "prometheus", configuration)
    (configuration / "targets" / "compose.yml").write_text(f'- targets: ["{service.url.removeprefix("http://")}"]\n')
    shutil.copytree(GENERATED / "prometheus", configuration / "rules")
    (configuration / "alertmanagers" / "compose.yml").unlink()
    (configuration / "token").write_text(service.token)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["prometheus", f"--config.file={configuration / 'prometheus.yml'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log:
        child = subprocess.Popen([*words, f"--storage.tsdb.path={folder / 'data'}"], stdout=log, stderr=log)
    try:
        server, deadline = Prometheus(f"http://{address}"), time.monotonic() + 30
        while not server.ready():
            assert child.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
            time.sleep(0.2)
        yield server
    finally:
        child.terminate()
        child.wait(10)
