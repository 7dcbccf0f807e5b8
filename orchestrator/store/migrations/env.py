"""Alembic's entry: migrates over the connection that it is handed, or over the URL of ``alembic -x url=...``."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from orchestrator.store.models import Base

__all__: list[str] = []


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    _migrate(given)
else:
    with create_engine(context.get_x_argument(as_dictionary=True)["url"]).connect() as opened:
        _migrate(opened)
        opened.commit()
