"""By rank, how much of what it told was stored: what is read from its files afterwards is not stored again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["downgrade", "upgrade"]

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add a column; what is there stays."""
    with op.batch_alter_table("attempts") as table:
        table.add_column(sa.Column("rank_numbers", sa.Text(), nullable=False, server_default="{}"))


def downgrade() -> None:
    """Drop what :func:`upgrade` added."""
    with op.batch_alter_table("attempts") as table:
        table.drop_column("rank_numbers")
