"""All that can be configured about the control plane. The only module of this room that touches the environment."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import SettingsInvalid

__all__ = [
    "DEFAULT_PORT", "Settings", "child_environment", "ensure_secret", "is_loopback",
    "ray_auth_environment",
]  # fmt: skip

DEFAULT_PORT = 8470
PlannerMode = Literal["process", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one control plane. Seconds and bytes."""

    state_dir: Path
    """Everything that the service writes: database, tokens, logs, records of processes."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    database: str | None = None
    """SQLAlchemy URL; None means SQLite in :attr:`state_dir`."""
    auth: bool = True
    """False serves everybody; allowed on loopback only."""
    tokens: Path | None = None
    """File of bearer tokens; None means ``token`` in :attr:`state_dir`."""
    ray_address: str | None = None
    """Ray to join; None means the one that ``dmuonctl up`` starts."""
    planner: PlannerMode = "process"
    metrics_grace_s: float = 300.0
    """How long a finished job's series stay."""
    metrics_series_budget: int = 200
    """How many Prometheus series a job may export; families over it are left out whole and counted."""
    gpu_look_s: float = 60.0
    """How often each node is asked who holds its GPUs."""
    max_request_bytes: int = 1 << 20
    max_streams: int = 2000
    """Streams of events and logs that may be open at once."""
    path_roots: tuple[Path, ...] = ()
    """Folders in which the paths of specs must lie; empty: anywhere that the workers can read."""
    history_s: float = 90 * 86_400.0
    """How long reports, small events and logs of a job that has ended are kept; audit entries four times as long."""
    request_timeout_s: float = 20.0
    """How long a client may take to send a request, and to take anything of an answer."""
    log_quota_bytes: int = 32 << 20
    """Of each stream of each rank in each attempt."""
    lease_s: float = 5.0
    """How long a silent control plane keeps the reconciler's lease."""
    plan_timeout_s: float = 300.0
    poll_interval_s: float = 0.25
    """Pause between two passes of the reconciler."""

    def __post_init__(self) -> None:
        if not self.auth and not is_loopback(self.host):
            raise SettingsInvalid(
                f"host is {self.host}, which others can reach, and auth is off: anybody could run jobs. "
                "Leave auth on, or bind 127.0.0.1."
            )
        if self.planner not in ("process", "ray"):
            raise SettingsInvalid(f"planner is {self.planner!r}; it must be 'process' or 'ray'")
        if not 0 <= self.port < 65536:
            raise SettingsInvalid(f"port is {self.port}; it must be between 0 and 65535")

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the store."""
        return self.database or f"sqlite:///{self.state_dir / 'service.db'}"

    @property
    def token_file(self) -> Path:
        """File of bearer tokens, one a line: a token, and after a blank its scopes (none means all)."""
        return self.tokens or self.state_dir / "token"

    @property
    def ray_token_file(self) -> Path:
        """File of the token that Ray's own processes ask for."""
        return self.state_dir / "ray-token"

    @classmethod
    def from_environment(cls, **overrides: Any) -> Settings:
        """Read ``DMUON_*`` variables; ``overrides`` that are not None win.

        Raises:
            SettingsInvalid: a variable that cannot be read, or a combination that would be unsafe.
        """
        read: dict[str, Any] = {"state_dir": Path.home() / ".local" / "state" / "dmuon"}
        for field, (variable, parse) in _VARIABLES.items():
            text = os.environ.get(variable)
            if text:
                read[field] = _parsed(variable, text, parse)
        read |= {name: value for name, value in overrides.items() if value is not None}
        return cls(**read)


def _folders(text: str) -> tuple[Path, ...]:
    found = tuple(Path(part) for part in text.split(os.pathsep) if part)
    if not all(path.is_absolute() for path in found):
        raise ValueError(text)
    return found


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", "off", "on"):
        raise ValueError(text)
    return text.lower() in ("1", "true", "on")


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


_VARIABLES: Mapping[str, tuple[str, Any]] = {
    "state_dir": ("DMUON_STATE_DIR", Path),
    "host": ("DMUON_HOST", str),
    "port": ("DMUON_PORT", int),
    "database": ("DMUON_DATABASE_URL", str),
    "auth": ("DMUON_AUTH", _flag),
    "tokens": ("DMUON_TOKEN_FILE", Path),
    "ray_address": ("DMUON_RAY_ADDRESS", str),
    "planner": ("DMUON_PLANNER", str),
    "metrics_grace_s": ("DMUON_METRICS_GRACE_S", _seconds),
    "metrics_series_budget": ("DMUON_METRICS_SERIES_BUDGET", _count),
    "gpu_look_s": ("DMUON_GPU_LOOK_S", _seconds),
    "max_request_bytes": ("DMUON_MAX_REQUEST_BYTES", _count),
    "max_streams": ("DMUON_MAX_STREAMS", _count),
    "path_roots": ("DMUON_PATH_ROOTS", _folders),
    "history_s": ("DMUON_HISTORY_S", _seconds),
    "request_timeout_s": ("DMUON_REQUEST_TIMEOUT_S", _seconds),
    "log_quota_bytes": ("DMUON_LOG_QUOTA_BYTES", _count),
}


_EXPECTED: Mapping[Any, str] = {
    int: "a whole number",
    _count: "a whole number above 0",
    _seconds: "a finite number of seconds above 0",
    _flag: "one of 0, 1, false, true, off, on",
    _folders: f"absolute folders with {os.pathsep!r} between",
}


def _parsed(variable: str, text: str, parse: Any) -> Any:
    try:
        return parse(text)
    except ValueError:
        expected = _EXPECTED.get(parse, parse.__name__)
        raise SettingsInvalid(f"{variable} is {text!r}; expected {expected}. Correct it or leave it out") from None


def is_loopback(host: str) -> bool:
    """True when only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_CONTAINER_SECRETS = Path("/run/secrets")
"""Where containers are handed secrets; what they look like there is not ours to say, and nobody else is in there."""


def _check_mode(path: Path) -> None:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077 and _CONTAINER_SECRETS not in path.absolute().parents:
        raise SettingsInvalid(
            f"the token file {path} has mode {mode:04o}: others can read or change it; expected 0600. "
            f"Run: chmod 600 {path}, and make a new token if others may have read this one"
        )


def ensure_secret(path: Path) -> str:
    """Return the first word of the file at ``path``, which is made with a fresh secret and mode 0600 if absent.

    Raises:
        SettingsInvalid: the file is empty or cannot be read, or others than its owner may use it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        # A link appears with its content, and only if nobody else's came first.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"the token file {path} cannot be read ({error}); expected tokens, one a line") from None
    if not words:
        raise SettingsInvalid(f"the token file {path} is empty; delete it, and a new token is made")
    _check_mode(path)
    return words[0]


def ray_auth_environment(token_file: Path) -> dict[str, str]:
    """Variables that make a process and its children speak to a Ray that asks for a token.

    The last one keeps a Ray of one machine on the loopback interface, whatever the platform is.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``extra``, for a child process."""
    return {**os.environ, **extra}
