"""Opening the store. The only place that knows which database it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.errors import StoreUnavailable, StoreUnusable

__all__ = ["BUSY_TIMEOUT_MS", "Database"]

BUSY_TIMEOUT_MS = 15_000
_PRAGMAS: dict[str, str | int] = {
    "journal_mode": "wal",
    "synchronous": 2,  # FULL: what was answered survives a loss of power, not only the death of this process
    "foreign_keys": 1,
    "busy_timeout": BUSY_TIMEOUT_MS,
}


_WRITERS = 0x646D756F6E
"""Key of the advisory lock that a writer holds on PostgreSQL."""
_POSTGRES_OPTIONS = (
    f"-c lock_timeout={BUSY_TIMEOUT_MS} -c statement_timeout={2 * BUSY_TIMEOUT_MS} "
    f"-c idle_in_transaction_session_timeout={2 * BUSY_TIMEOUT_MS} -c synchronous_commit=on -c timezone=utc"
)


class Database:
    """An open store; sessions come from :meth:`read` and :meth:`write`.

    The laws are the same on both databases: a reader sees one state, and one writer writes at a time, which SQLite
    gives by ``BEGIN IMMEDIATE`` and PostgreSQL by an advisory lock that a transaction holds.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError:  # its text may hold a password: it is not repeated
            raise StoreUnusable(
                "the database's URL cannot be read; expected sqlite:////PATH or postgresql://USER@HOST/NAME"
            ) from None
        self._sqlite = parsed.get_backend_name() == "sqlite"
        self._writing = threading.Lock()
        # Readers and writers are bounded by the server's threads, so the pool only has to be larger than those.
        if self._sqlite:
            if parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            self.engine = create_engine(url, pool_size=20, max_overflow=60, pool_timeout=30)
            event.listen(self.engine, "connect", _set_pragmas)
            event.listen(self.engine, "begin", _begin)
            reader = self.engine
        else:
            self.engine = _postgres_engine(parsed)
            event.listen(self.engine, "begin", _queue_writers)
            reader = self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._writer = self.engine.execution_options(writer=True)
        self._read = sessionmaker(reader, expire_on_commit=False)
        self._write = sessionmaker(self._writer, expire_on_commit=False)

    def migrate(self, revision: str = "head") -> None:
        """Bring the tables forward to ``revision``, by default the newest.

        Raises:
            StoreUnusable: it cannot be reached, does not keep the settings on which the store relies, or is of a newer
                release.
        """
        config = _config()
        known = self.revisions()
        try:
            self._verify()
            with self._writer.connect() as connection:
                found = MigrationContext.configure(connection).get_current_revision()
                if found is not None and found not in known:
                    raise StoreUnusable(f"the tables are of version {found}, newer than {known[-1]}; use that release")
                config.attributes["connection"] = connection
                command.upgrade(config, revision)
                connection.commit()
        except OperationalError as error:
            raise StoreUnusable(f"{self.engine.url!r} cannot be used: {error.orig}") from None

    @staticmethod
    def revisions() -> list[str]:
        """Return the versions of the tables that were ever released, oldest first."""
        return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()][::-1]

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
        """A session that commits at the end, and that no other writer is beside.

        Raises:
            StoreUnavailable: another writer of this process does not end.
        """
        with self._turn(), self._write() as session, session.begin():
            yield session

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the other writers of this process: SQLite itself waits by looking again after ever longer pauses."""
        if not self._sqlite:
            yield
            return
        if not self._writing.acquire(timeout=BUSY_TIMEOUT_MS / 1000):
            raise StoreUnavailable(f"another write has not ended for {BUSY_TIMEOUT_MS / 1000:g} s")
        try:
            yield
        finally:
            self._writing.release()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def _postgres_engine(url: URL) -> Engine:
    if url.get_backend_name() != "postgresql":
        raise StoreUnusable(f"the database is {url.get_backend_name()}; sqlite and postgresql are known")
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    try:
        return create_engine(
            url,
            pool_size=20,
            max_overflow=20,
            pool_timeout=30,
            pool_pre_ping=True,  # a connection that the server has ended is replaced, not used
            connect_args={"connect_timeout": 5, "options": _POSTGRES_OPTIONS},
        )
    except ModuleNotFoundError as error:
        raise StoreUnusable(f"{error}; PostgreSQL needs: pip install 'dmuon-service[postgres]'") from None


def _queue_writers(connection: Connection) -> None:
    if connection.get_execution_options().get("writer", False):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITERS})")


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
