"""A PostgreSQL of the tests' own: a cluster in a temporary folder, reached through a socket in it, on no port."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from orchestrator.store.database import Database

__all__ = ["Postgres", "find_postgres", "running_postgres"]


def find_postgres() -> Path | None:
    """Return the folder of PostgreSQL's programs as Debian installs them; None without them."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


class Postgres:
    """A cluster that hands out databases. As root it runs as the user ``postgres``, since it refuses root."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder, self._numbers = programs, folder, itertools.count()
        self._template: str | None = None
        self._who: dict[str, Any] = {}
        self._server: subprocess.Popen[bytes] | None = None
        if os.getuid() == 0:
            account = pwd.getpwnam("postgres")
            os.chown(folder, account.pw_uid, account.pw_gid)
            self._who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def make(self) -> None:
        """Write the cluster's files."""
        words = [self._programs / "initdb", "-D", self._folder / "data", "-U", "postgres", "-A", "trust"]
        words += ["-E", "UTF8", "--no-locale", "-N"]
        subprocess.run(words, check=True, capture_output=True, cwd=self._folder, **self._who)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = {"listen_addresses": "", "unix_socket_directories": self._folder}
        settings |= {"fsync": "off", "max_connections": 120}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", *words],
                stdout=log, stderr=log, cwd=self._folder, **self._who,
            )  # fmt: skip
        _wait(self._folder, self._server)

    def stop(self, *, immediately: bool = False) -> None:
        """End the server; ``immediately`` as ``pg_ctl stop -m immediate`` does: it recovers when it starts."""
        assert self._server is not None
        # SIGINT ends open connections, for which SIGTERM would wait.
        self._server.send_signal(signal.SIGQUIT if immediately else signal.SIGINT)
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def url(self, name: str) -> str:
        """SQLAlchemy URL of a database."""
        return f"postgresql://postgres@/{name}?host={self._folder}"

    def empty(self) -> str:
        """Make an empty database and return its URL."""
        return self._make("template0")

    def migrated(self) -> str:
        """Make a database with all tables and return its URL: a copy of one that was migrated once."""
        if self._template is None:
            url = self.empty()
            database = Database(url)
            database.migrate()
            database.close()
            self._template = url.partition("@/")[2].partition("?")[0]
        return self._make(self._template)

    def drop_connections(self) -> None:
        """End every other connection, as a restart of the server would."""
        self._execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def rename(self, url: str, *, back: bool = False) -> None:
        """Take a database away, or bring it ``back``."""
        name = url.partition("@/")[2].partition("?")[0]
        self.drop_connections()
        old, new = (f"{name}_away", name) if back else (name, f"{name}_away")
        self._execute(f"ALTER DATABASE {old} RENAME TO {new}")

    def _make(self, template: str) -> str:
        name = f"test_{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def _execute(self, statement: str) -> None:
        with psycopg.connect(f"host={self._folder} user=postgres dbname=postgres", autocommit=True) as connection:
            connection.execute(statement)


@contextmanager
def running_postgres(programs: Path) -> Iterator[Postgres]:
    """Make a cluster, start it, and end it."""
    folder = Path(tempfile.mkdtemp(prefix="dmuon-pg-"))
    cluster = Postgres(programs, folder)
    cluster.make()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(folder: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(f"host={folder} user=postgres dbname=postgres").close()
            return
        except psycopg.OperationalError as error:
            log = (folder / "log").read_text(errors="replace")
            if server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{error}\n{log}") from None
            time.sleep(0.05)
