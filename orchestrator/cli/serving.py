"""``up`` and ``down``: the server in the foreground, Ray beside it in a session of its own."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping

from orchestrator.api.app import create_app
from orchestrator.cli._console import console, server_record_path
from orchestrator.errors import SettingsInvalid
from orchestrator.launcher_process import ProcessLauncher
from orchestrator.planner import EntryPlanner, Planner, ProcessPlanner
from orchestrator.processes import ProcessRecord, end_processes, helpers_of
from orchestrator.ray_keeper import RayKeeper
from orchestrator.ray_process import start_ray, stop_ray
from orchestrator.server import serve
from orchestrator.settings import Settings, ensure_secret, ray_auth_environment

__all__ = ["down", "up"]


def up(settings: Settings, *, num_cpus: int | None) -> None:
    """Serve until a signal comes. Ray, and what runs on it, stays; ``down`` ends it."""
    _make_state_dir(settings)
    record_path = server_record_path(settings)
    running = ProcessRecord.load(record_path)
    if running is not None:
        raise SettingsInvalid(
            f"the service of {settings.state_dir} runs already at {running.address}; use it, end it with "
            "'dmuonctl down', or give this one another DMUON_STATE_DIR"
        )
    _check_port(settings)
    address, environment = settings.ray_address, {}
    if address is None:
        address = start_ray(settings, num_cpus=num_cpus).address
        environment = ray_auth_environment(settings.ray_token_file)
    launcher = ProcessLauncher(address, environment)
    planner, moved = _planner(settings, address, environment)
    keeper = RayKeeper(settings, num_cpus=num_cpus, moved=(launcher.move, *moved))
    app = create_app(settings, launcher, planner)
    url = f"http://{settings.host}:{settings.port}"
    ProcessRecord.of(os.getpid(), url).save(record_path)
    console.print(f"service {url}  Ray {address}  state {settings.state_dir}", markup=False)
    console.print(
        f"live page {_page_address(settings, url, to_person=console.is_terminal)}", markup=False, soft_wrap=True
    )
    if settings.ray_address is None:
        keeper.start()
    try:
        serve(app, settings.host, settings.port)
    finally:
        keeper.stop()
        record_path.unlink(missing_ok=True)
    if settings.ray_address is None:
        console.print("The server has ended; Ray and its jobs run on. 'dmuonctl up' finds them, 'down' ends them.")


def _make_state_dir(settings: Settings) -> None:
    """Make the folder, for its owner alone, and see that it can be written to.

    Raises:
        SettingsInvalid: it cannot.
    """
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.state_dir):
            pass
    except OSError as error:
        raise SettingsInvalid(
            f"the state directory {settings.state_dir} cannot be written to ({error.strerror}); "
            "name another one in DMUON_STATE_DIR"
        ) from None


def _page_address(settings: Settings, url: str, *, to_person: bool) -> str:
    """Return where the live page is; for a person, not for a log, with the token in the fragment, which is not sent."""
    if not settings.auth or not to_person:
        return f"{url}/"
    return f"{url}/#token={ensure_secret(settings.token_file)}"


def _check_port(settings: Settings) -> None:
    """See that the port is free before anything is started.

    Raises:
        SettingsInvalid: it is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise SettingsInvalid(
                f"port {settings.port} of {settings.host} cannot be used ({error.strerror}); choose another with --port"
            ) from None


def _planner(
    settings: Settings, address: str, environment: Mapping[str, str]
) -> tuple[Planner, tuple[Callable[[str], None], ...]]:
    """Return the planner, and what is to be told when Ray's address changes."""
    if settings.planner == "ray":
        own = ProcessLauncher(address, environment)  # planning is slow: it must not hold up the reconciler's calls
        return EntryPlanner(own.run_entry, own.close), (own.move,)
    return ProcessPlanner(timeout_s=settings.plan_timeout_s), ()


def down(settings: Settings) -> list[int]:
    """End the server and Ray of this state directory; return the ids of processes that would not end."""
    left: list[int] = []
    record = ProcessRecord.load(server_record_path(settings))
    process = None if record is None else record.process()
    if process is not None:
        left = end_processes(process, helpers_of(process), patience_s=10.0)
        server_record_path(settings).unlink(missing_ok=True)
    return left + stop_ray(settings)
