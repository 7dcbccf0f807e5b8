"""Settings: unsafe ones are refused, secrets are for their owner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.errors import SettingsInvalid
from orchestrator.settings import Settings, ensure_secret, is_loopback
from tests.architecture.source import ROOT


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


def test_defaults_are_those_of_the_operators_guide(tmp_path: Path) -> None:
    text, settings = (ROOT / "docs" / "operate.md").read_text(), Settings(state_dir=tmp_path)
    assert f"at most {settings.metrics_series_budget} series (`DMUON_METRICS_SERIES_BUDGET`)" in text
    assert f"`DMUON_METRICS_GRACE_S` ({settings.metrics_grace_s:g} s)" in text
    assert settings.metrics_series_budget == 200


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMUON_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DMUON_PORT", "1234")
    assert Settings.from_environment().port == 1234
    assert Settings.from_environment(port=5, host=None).port == 5


@pytest.mark.parametrize(
    ("variable", "found", "expected"),
    [
        ("DMUON_PORT", "many", "a whole number"),
        ("DMUON_MAX_REQUEST_BYTES", "-1", "a whole number above 0"),
        ("DMUON_MAX_STREAMS", "0", "a whole number above 0"),
        ("DMUON_REQUEST_TIMEOUT_S", "nan", "a finite number of seconds above 0"),
        ("DMUON_HISTORY_S", "-3", "a finite number of seconds above 0"),
        ("DMUON_AUTH", "maybe", "one of 0, 1"),
        ("DMUON_PATH_ROOTS", "here", "absolute folders"),
    ],
)
def test_a_setting_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, variable: str, found: str, expected: str
) -> None:
    monkeypatch.setenv(variable, found)
    with pytest.raises(SettingsInvalid, match=f"{variable} is '{found}'; expected {expected}"):
        Settings.from_environment()


def test_a_token_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe\n")
    for path in (tmp_path / "token", tmp_path):
        with pytest.raises(SettingsInvalid, match=f"the token file {path} cannot be read"):
            ensure_secret(path)


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
