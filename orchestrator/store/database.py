"""Opening the store. The only place that knows which database it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.errors import StoreUnusable

__all__ = ["BUSY_TIMEOUT_MS", "Database"]

BUSY_TIMEOUT_MS = 15_000
_PRAGMAS: dict[str, str | int] = {
    "journal_mode": "wal",
    "synchronous": 1,
    "foreign_keys": 1,
    "busy_timeout": BUSY_TIMEOUT_MS,
}


class Database:
    """An open store; sessions come from :meth:`read` and :meth:`write`."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        self._sqlite = parsed.get_backend_name() == "sqlite"
        if self._sqlite and parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        # Readers and writers are bounded by the server's threads, so the pool only has to be larger than those.
        self.engine = create_engine(url, pool_size=20, max_overflow=60, pool_timeout=30)
        if self._sqlite:
            event.listen(self.engine, "connect", _set_pragmas)
            event.listen(self.engine, "begin", _begin)
        self._writer = self.engine.execution_options(writer=True)
        self._read = sessionmaker(self.engine, expire_on_commit=False)
        self._write = sessionmaker(self._writer, expire_on_commit=False)

    def migrate(self) -> None:
        """Bring the tables to the newest version.

        Raises:
            StoreUnusable: the database does not keep the settings on which the store relies.
        """
        self._verify()
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        with self._writer.connect() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()

    def _verify(self) -> None:
        with self.engine.connect() as connection:
            if not self._sqlite:
                connection.execute(text("SELECT 1"))
                return
            found = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in _PRAGMAS}
        wrong = [f"{name} is {found[name]!r}, not {want!r}" for name, want in _PRAGMAS.items() if found[name] != want]
        if wrong:
            raise StoreUnusable(f"SQLite did not take its settings: {'; '.join(wrong)}. Use a local file system.")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one state of the store and writes nothing."""
        with self._read() as session, session.begin():
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that commits at the end; on SQLite it holds the write lock from its first statement."""
        with self._write() as session, session.begin():
            yield session

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _set_pragmas(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver would otherwise begin transactions by itself, and deferred ones
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")  # first: the switch to WAL may have to wait
    for name, value in _PRAGMAS.items():
        cursor.execute(f"PRAGMA {name}={value}")
    cursor.close()


def _begin(connection: Connection) -> None:
    # A transaction that reads first and then writes fails at once when another one wrote in between, whatever the
    # busy timeout is. A writer therefore takes the lock before it reads.
    writer = connection.get_execution_options().get("writer", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writer else "BEGIN")
