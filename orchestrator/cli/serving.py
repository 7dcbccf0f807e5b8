"""``up`` and ``down``: the server in the foreground, Ray beside it in a session of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

from orchestrator.api.app import create_app
from orchestrator.cli._console import console, server_record_path
from orchestrator.errors import RayProcessError
from orchestrator.launcher_process import ProcessLauncher
from orchestrator.planner import EntryPlanner, Planner, ProcessPlanner
from orchestrator.processes import ProcessRecord, end_processes, helpers_of
from orchestrator.ray_process import start_ray, stop_ray
from orchestrator.server import serve
from orchestrator.settings import Settings, ray_auth_environment

__all__ = ["down", "up"]


def up(settings: Settings, *, num_cpus: int | None) -> None:
    """Serve until a signal comes. Ray, and what runs on it, stays; ``down`` ends it."""
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    record_path = server_record_path(settings)
    running = ProcessRecord.load(record_path)
    if running is not None:
        raise RayProcessError(f"the service of {settings.state_dir} runs already at {running.address}")
    address, environment = settings.ray_address, {}
    if address is None:
        address = start_ray(settings, num_cpus=num_cpus).address
        environment = ray_auth_environment(settings.ray_token_file)
    app = create_app(settings, ProcessLauncher(address, environment), _planner(settings, address, environment))
    url = f"http://{settings.host}:{settings.port}"
    ProcessRecord.of(os.getpid(), url).save(record_path)
    console.print(f"service {url}  Ray {address}  state {settings.state_dir}", markup=False)
    try:
        serve(app, settings.host, settings.port)
    finally:
        record_path.unlink(missing_ok=True)


def _planner(settings: Settings, address: str, environment: Mapping[str, str]) -> Planner:
    if settings.planner == "ray":
        own = ProcessLauncher(address, environment)  # planning is slow: it must not hold up the reconciler's calls
        return EntryPlanner(own.run_entry, own.close)
    return ProcessPlanner(timeout_s=settings.plan_timeout_s)


def down(settings: Settings) -> list[int]:
    """End the server and Ray of this state directory; return the ids of processes that would not end."""
    left: list[int] = []
    record = ProcessRecord.load(server_record_path(settings))
    process = None if record is None else record.process()
    if process is not None:
        left = end_processes(process, helpers_of(process), patience_s=10.0)
        server_record_path(settings).unlink(missing_ok=True)
    return left + stop_ray(settings)
