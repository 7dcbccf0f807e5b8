"""Settings: unsafe ones are refused, secrets are for their owner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import SettingsInvalid
from orchestrator.settings import Settings, ensure_secret, is_loopback


def test_others_are_served_with_auth_only(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="auth is off"):
        Settings(state_dir=tmp_path, host="0.0.0.0", auth=False)
    Settings(state_dir=tmp_path, host="0.0.0.0")
    Settings(state_dir=tmp_path, auth=False)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False), ("x", False)]
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMUON_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DMUON_PORT", "1234")
    assert Settings.from_environment().port == 1234
    assert Settings.from_environment(port=5, host=None).port == 5
    monkeypatch.setenv("DMUON_PORT", "many")
    with pytest.raises(SettingsInvalid, match="DMUON_PORT"):
        Settings.from_environment()


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: ensure_secret(tmp_path / "s"), range(50)))
    assert len(found) == 1 and len(found.pop()) == 64
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
def test_a_token_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("a-secret jobs:read\n")
    path.chmod(mode)
    with pytest.raises(SettingsInvalid, match=f"has mode {mode:04o}.*chmod 600") as refused:
        ensure_secret(path)
    assert "a-secret" not in str(refused.value)
    path.chmod(0o600)
    assert ensure_secret(path) == "a-secret"
