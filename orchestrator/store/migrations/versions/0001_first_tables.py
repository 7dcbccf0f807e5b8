"""First tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

__all__ = ["downgrade", "upgrade"]

revision = "0001"
down_revision = None

_BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _create_breaker_transitions() -> None:
    op.create_table(
        "breaker_transitions",
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kernel", sa.String(32), nullable=False),
        sa.Column("scope", sa.String(32), nullable=False),
        sa.Column("from_state", sa.String(16), nullable=False),
        sa.Column("to_state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("epoch", name=op.f("pk_breaker_transitions")),
    )


def _create_breakers() -> None:
    op.create_table(
        "breakers",
        sa.Column("kernel", sa.String(32), nullable=False),
        sa.Column("scope", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("kernel", "scope", name=op.f("pk_breakers")),
    )


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("caller", sa.String(64), nullable=False),
        sa.Column("route", sa.String(255), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("caller", "route", "key", name=op.f("pk_idempotency_keys")),
    )


def _create_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )


def _create_plans() -> None:
    op.create_table(
        "plans",
        sa.Column("plan_hash", sa.String(128), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("plan_hash", name=op.f("pk_plans")),
    )


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", _BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("expected_plan_hash", sa.String(128), nullable=True),
        sa.Column("plan_hash", sa.String(128), nullable=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(32), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("field_errors", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("state_since", sa.Float(), nullable=False),
        sa.Column("queue_wait_s", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["plan_hash"], ["plans.plan_hash"], name=op.f("fk_jobs_plan_hash")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
    )
    op.create_index(op.f("ix_jobs_finished_at"), "jobs", ["finished_at"])
    op.create_index(op.f("ix_jobs_project_number"), "jobs", ["project", "number"])
    op.create_index(op.f("ix_jobs_state_number"), "jobs", ["state", "number"])


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("id", _BIG, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("fence", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("launched_at", sa.Float(), nullable=True),
        sa.Column("placed_at", sa.Float(), nullable=True),
        sa.Column("formed_at", sa.Float(), nullable=True),
        sa.Column("stop_sent_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("end_reason", sa.String(32), nullable=True),
        sa.Column("end_message", sa.Text(), nullable=True),
        sa.Column("cursor", _BIG, nullable=False),
        sa.Column("dropped", _BIG, nullable=False),
        sa.Column("alive_ranks", sa.Integer(), nullable=False),
        sa.Column("epoch_sent", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("job_id", "number", name=op.f("uq_attempts_job_id_number")),
    )


def _create_conditions() -> None:
    op.create_table(
        "conditions",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("status", sa.String(8), nullable=False),
        sa.Column("reason", sa.String(64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_conditions_job_id")),
        sa.PrimaryKeyConstraint("job_id", "type", name=op.f("pk_conditions")),
    )


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id")),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_events")),
    )


def _create_job_labels() -> None:
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("value", sa.String(255), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_labels_job_id")),
        sa.PrimaryKeyConstraint("job_id", "key", name=op.f("pk_job_labels")),
    )
    op.create_index(op.f("ix_job_labels_key_value"), "job_labels", ["key", "value"])


def _create_rank_errors() -> None:
    op.create_table(
        "rank_errors",
        sa.Column("attempt_id", _BIG, nullable=False),
        sa.Column("seq", _BIG, nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_rank_errors_attempt_id")),
        sa.PrimaryKeyConstraint("attempt_id", "seq", name=op.f("pk_rank_errors")),
    )


def _create_rank_reports() -> None:
    op.create_table(
        "rank_reports",
        sa.Column("attempt_id", _BIG, nullable=False),
        sa.Column("step", _BIG, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("seq", _BIG, nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_rank_reports_attempt_id")),
        sa.PrimaryKeyConstraint("attempt_id", "step", "rank", name=op.f("pk_rank_reports")),
        sa.UniqueConstraint("attempt_id", "seq", name=op.f("uq_rank_reports_attempt_id_seq")),
    )


def _create_rank_totals() -> None:
    op.create_table(
        "rank_totals",
        sa.Column("attempt_id", _BIG, nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("step", _BIG, nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_rank_totals_attempt_id")),
        sa.PrimaryKeyConstraint("attempt_id", "rank", name=op.f("pk_rank_totals")),
    )


def upgrade() -> None:
    """Create all tables, those that others refer to first."""
    _create_breaker_transitions()
    _create_breakers()
    _create_idempotency_keys()
    _create_leases()
    _create_plans()
    _create_jobs()
    _create_attempts()
    _create_conditions()
    _create_events()
    _create_job_labels()
    _create_rank_errors()
    _create_rank_reports()
    _create_rank_totals()


def downgrade() -> None:
    """Drop all tables, those that refer to others first."""
    for name in (
        "rank_totals",
        "rank_reports",
        "rank_errors",
        "job_labels",
        "events",
        "conditions",
        "attempts",
        "jobs",
        "plans",
        "leases",
        "idempotency_keys",
        "breakers",
        "breaker_transitions",
    ):
        op.drop_table(name)
