"""Ray as a process of its own, really started: loopback only, with a token, and gone after ``stop_ray``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.processes import ProcessRecord, session_processes
from orchestrator.ray_process import live_ray, start_ray, stop_ray
from orchestrator.settings import Settings, child_environment, is_loopback, ray_auth_environment

pytestmark = pytest.mark.service

CONNECT = """
import sys, json
from orchestrator.launcher_process import ProcessLauncher
from orchestrator.launcher_api import AttemptRef
from orchestrator.errors import ServiceError
launcher = ProcessLauncher(sys.argv[1], json.loads(sys.argv[2]))
try:
    print("capacity", launcher.capacity().nodes[0].cpus, flush=True)
    launcher.poll(AttemptRef("j", 1, "f"), 0, 10)
except ServiceError as error:
    print(type(error).__name__, flush=True)
finally:
    launcher.close()
print("ray" in sys.modules)
"""


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, ProcessRecord]]:
    settings = Settings(state_dir=tmp_path_factory.mktemp("state"))
    yield settings, start_ray(settings, num_cpus=2)
    stop_ray(settings)


def connect(record: ProcessRecord, environment: dict[str, str]) -> str:
    words = [sys.executable, "-c", CONNECT, record.address, json.dumps(environment)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=90, env=child_environment({"HOME": "/nowhere"})
    )
    return done.stdout


def test_it_is_joined_and_not_started_twice(ray: tuple[Settings, ProcessRecord]) -> None:
    settings, record = ray
    assert start_ray(settings) == record == live_ray(settings)


def test_who_has_the_token_is_served(ray: tuple[Settings, ProcessRecord]) -> None:
    settings, record = ray
    assert connect(record, ray_auth_environment(settings.ray_token_file)) == "capacity 2.0\nSupervisorGone\nFalse\n"


def test_who_has_another_token_is_refused(ray: tuple[Settings, ProcessRecord], tmp_path: Path) -> None:
    _, record = ray
    (tmp_path / "wrong").write_text("0" * 64)
    assert connect(record, ray_auth_environment(tmp_path / "wrong")) == "LauncherUnavailable\nFalse\n"


def test_it_listens_on_loopback_only(ray: tuple[Settings, ProcessRecord]) -> None:
    _, record = ray
    processes = session_processes(record.pid)
    assert len(processes) >= 3
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening and all(map(is_loopback, listening)), listening


def test_nothing_is_left(ray: tuple[Settings, ProcessRecord]) -> None:
    settings, record = ray
    before = session_processes(record.pid)
    assert stop_ray(settings) == []
    assert not [process for process in before if process.is_running()]
    assert live_ray(settings) is None
    assert record.temp_dir is not None and not Path(record.temp_dir).exists()
    assert stop_ray(settings) == []  # again: nothing to do
