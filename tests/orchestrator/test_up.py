"""``up`` refuses what cannot work before it starts anything, and Ray that has lost a part is not joined."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from orchestrator.cli.serving import up
from orchestrator.errors import SettingsInvalid
from orchestrator.processes import session_processes
from orchestrator.ray_process import live_ray, start_ray, stop_ray
from orchestrator.settings import Settings, ensure_secret


def test_a_state_directory_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(SettingsInvalid, match="DMUON_STATE_DIR"):
            up(Settings(state_dir=path), num_cpus=1)


def test_a_port_that_is_taken_starts_no_ray(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = Settings(state_dir=tmp_path, port=taken.getsockname()[1])
        with pytest.raises(SettingsInvalid, match="--port"):
            up(settings, num_cpus=1)
    assert live_ray(settings) is None


def test_a_new_state_directory_is_its_owners(tmp_path: Path) -> None:
    """Its database holds what others may not read: specs, answers, the fences of attempts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        settings = Settings(state_dir=tmp_path / "new" / "state", port=taken.getsockname()[1])
        with pytest.raises(SettingsInvalid):
            up(settings, num_cpus=1)
    assert settings.state_dir.stat().st_mode & 0o777 == 0o700


def test_an_empty_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(SettingsInvalid, match="delete it"):
        ensure_secret(tmp_path / "token")


@pytest.mark.service
def test_ray_without_its_raylet_is_replaced_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    first = start_ray(settings, num_cpus=1)
    try:
        assert start_ray(settings, num_cpus=1) == first, "a whole one is joined"
        raylet = next(p for p in session_processes(first.pid) if p.name() == "raylet")
        raylet.kill()
        raylet.wait(10)
        second = start_ray(settings, num_cpus=1)
        assert second.pid != first.pid and not psutil.pid_exists(first.pid)
        assert first.temp_dir is not None and not Path(first.temp_dir).exists()
        head = second.process()
        assert head is not None
        head.kill()
        head.wait(10)
        assert session_processes(second.pid), "the head's end alone does not end the others"
        assert stop_ray(settings) == []
        assert not [p for p in session_processes(second.pid) if p.status() != psutil.STATUS_ZOMBIE]
    finally:
        stop_ray(settings)
