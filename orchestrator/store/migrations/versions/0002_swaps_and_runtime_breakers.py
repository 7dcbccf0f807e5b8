"""Kernel swaps, breakers that move by themselves, and words that expire."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["downgrade", "upgrade"]

revision = "0002"
down_revision = "0001"

_BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add two tables and a column; what is there stays."""
    with op.batch_alter_table("breakers") as table:
        table.add_column(sa.Column("expires_at", sa.Float(), nullable=True))
    _create_kernel_swaps()
    _create_runtime_transitions()


def _create_kernel_swaps() -> None:
    op.create_table(
        "kernel_swaps",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("deadline_s", sa.Float(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("requested_at", sa.Float(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("step", _BIG, nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_kernel_swaps_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kernel_swaps")),
        sa.UniqueConstraint("number", name=op.f("uq_kernel_swaps_number")),
    )
    op.create_index(op.f("ix_kernel_swaps_job_id"), "kernel_swaps", ["job_id"])


def _create_runtime_transitions() -> None:
    op.create_table(
        "runtime_transitions",
        sa.Column("id", _BIG, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(32), nullable=False),
        sa.Column("size_class", _BIG, nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("from_state", sa.String(16), nullable=False),
        sa.Column("to_state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("step", _BIG, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_runtime_transitions_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runtime_transitions")),
    )
    op.create_index(op.f("ix_runtime_transitions_job_id"), "runtime_transitions", ["job_id"])


def downgrade() -> None:
    """Drop what :func:`upgrade` added."""
    op.drop_table("runtime_transitions")
    op.drop_table("kernel_swaps")
    with op.batch_alter_table("breakers") as table:
        table.drop_column("expires_at")
