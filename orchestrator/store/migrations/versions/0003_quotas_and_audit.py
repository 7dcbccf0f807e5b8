"""Quotas of projects, the record of who changed what, priorities, and the memory that a plan needs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["downgrade", "upgrade"]

revision = "0003"
down_revision = "0002"

_BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add two tables and two columns; what is there stays."""
    with op.batch_alter_table("jobs") as table:
        table.add_column(sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
        table.add_column(sa.Column("planned_bytes", _BIG, nullable=True))
    op.create_table(
        "quotas",
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("cpus", sa.Float(), nullable=True),
        sa.Column("gpus", sa.Float(), nullable=True),
        sa.Column("memory_bytes", _BIG, nullable=True),
        sa.Column("jobs", sa.Integer(), nullable=True),
        sa.Column("waiting_jobs", sa.Integer(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_quotas")),
    )
    op.create_table(
        "audit",
        sa.Column("number", _BIG, autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.String(64), nullable=False),
        sa.Column("outcome", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_at"), "audit", ["at"])


def downgrade() -> None:
    """Drop what :func:`upgrade` added."""
    op.drop_table("audit")
    op.drop_table("quotas")
    with op.batch_alter_table("jobs") as table:
        table.drop_column("planned_bytes")
        table.drop_column("priority")
