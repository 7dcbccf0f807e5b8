"""Rows of the store. Times are seconds since the epoch; documents are JSON text of the contract's models."""

from __future__ import annotations

from sqlalchemy import BigInteger, Dialect, Float, ForeignKey, Index, Integer, MetaData, TypeDecorator, UniqueConstraint
from sqlalchemy import String as _PlainString
from sqlalchemy import Text as _PlainText
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = [
    "Attempt", "AuditRow", "Base", "Breaker", "BreakerTransition", "Condition", "Event", "IdempotencyKey", "Job",
    "JobLabel", "KernelSwap", "Lease", "Plan", "QuotaRow", "RankErrorRow", "RankReportRow", "RankTotals",
    "RuntimeTransition",
]  # fmt: skip

_Big = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up by itself only in a column declared INTEGER."""


def _storable(text: str | None) -> str | None:
    """Return ``text`` without what PostgreSQL takes for no text: NUL, and halves of surrogate pairs."""
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


class String(TypeDecorator[str]):
    """Short text, in rows and in what they are compared with."""

    impl, cache_ok = _PlainString, True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Called with each value on its way to the database."""
        return _storable(value)


class Text(TypeDecorator[str]):
    """Text of any length."""

    impl, cache_ok = _PlainText, True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Called with each value on its way to the database."""
        return _storable(value)


class Base(DeclarativeBase):
    """Base of all rows; constraints have names, so that migrations can address them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Plan(Base):
    """A plan, by its hash."""

    __tablename__ = "plans"

    plan_hash: Mapped[str] = mapped_column(String(128), primary_key=True)
    body: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)


class Job(Base):
    """A job. ``version`` grows with each change of state; ``number`` is the order of submission."""

    __tablename__ = "jobs"
    __table_args__ = (Index(None, "state", "number"), Index(None, "project", "number"))

    number: Mapped[int] = mapped_column(_Big, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(String(64))
    project: Mapped[str] = mapped_column(String(64))
    spec: Mapped[str] = mapped_column(Text)
    expected_plan_hash: Mapped[str | None] = mapped_column(String(128))
    plan_hash: Mapped[str | None] = mapped_column(ForeignKey("plans.plan_hash"))
    state: Mapped[str] = mapped_column(String(16))
    version: Mapped[int] = mapped_column(Integer, default=1)
    reason: Mapped[str | None] = mapped_column(String(32))
    """Why it ended; before that, the intended end of a job that is STOPPING."""
    message: Mapped[str] = mapped_column(Text, default="")
    field_errors: Mapped[str] = mapped_column(Text, default="[]")
    created_at: Mapped[float] = mapped_column(Float)
    state_since: Mapped[float] = mapped_column(Float)
    queue_wait_s: Mapped[float | None] = mapped_column(Float)
    priority: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    planned_bytes: Mapped[int | None] = mapped_column(_Big)
    """Memory that the plan foresees on its fullest rank; None: no plan, or one that does not say."""
    finished_at: Mapped[float | None] = mapped_column(Float, index=True)
    last_event: Mapped[int] = mapped_column(Integer, default=0)


class JobLabel(Base):
    """A label of a job, for filters."""

    __tablename__ = "job_labels"
    __table_args__ = (Index(None, "key", "value"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    value: Mapped[str] = mapped_column(String(255))


class Attempt(Base):
    """One try to run a job. ``cursor`` is the last entry of its supervisor's outbox that was stored."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("job_id", "number"),)

    id: Mapped[int] = mapped_column(_Big, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    number: Mapped[int] = mapped_column(Integer)
    fence: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float)
    launched_at: Mapped[float | None] = mapped_column(Float)
    """When the supervisor was known to exist; None: nobody knows."""
    placed_at: Mapped[float | None] = mapped_column(Float)
    formed_at: Mapped[float | None] = mapped_column(Float)
    stop_sent_at: Mapped[float | None] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    end_reason: Mapped[str | None] = mapped_column(String(32))
    end_message: Mapped[str | None] = mapped_column(Text)
    cursor: Mapped[int] = mapped_column(_Big, default=0)
    dropped: Mapped[int] = mapped_column(_Big, default=0)
    alive_ranks: Mapped[int] = mapped_column(Integer, default=0)
    epoch_sent: Mapped[int] = mapped_column(Integer, default=0)
    rank_numbers: Mapped[str] = mapped_column(Text, default="{}", server_default="{}")
    """JSON: by rank, the last of its own numbers that was stored."""


class RankReportRow(Base):
    """A step report of one rank, as it came."""

    __tablename__ = "rank_reports"
    __table_args__ = (UniqueConstraint("attempt_id", "seq"),)

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    step: Mapped[int] = mapped_column(_Big, primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True)
    seq: Mapped[int] = mapped_column(_Big)
    body: Mapped[str] = mapped_column(Text)


class RankTotals(Base):
    """The last report of one rank in an attempt: its totals are the attempt's."""

    __tablename__ = "rank_totals"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True)
    step: Mapped[int] = mapped_column(_Big)
    body: Mapped[str] = mapped_column(Text)


class RankErrorRow(Base):
    """An exception with which a rank ended."""

    __tablename__ = "rank_errors"

    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(_Big, primary_key=True)
    body: Mapped[str] = mapped_column(Text)


class Event(Base):
    """Something that happened to a job; ``seq`` counts from 1 without gaps within the job."""

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    kind: Mapped[str] = mapped_column(String(64))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[str] = mapped_column(Text, default="{}")


class Condition(Base):
    """What is known about one aspect of a job: True, False or Unknown."""

    __tablename__ = "conditions"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    type: Mapped[str] = mapped_column(String(64), primary_key=True)
    status: Mapped[str] = mapped_column(String(8))
    reason: Mapped[str] = mapped_column(String(64))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[str] = mapped_column(Text, default="{}")
    since: Mapped[float] = mapped_column(Float)


class IdempotencyKey(Base):
    """A key of a caller for a route, with the answer that was given."""

    __tablename__ = "idempotency_keys"

    caller: Mapped[str] = mapped_column(String(64), primary_key=True)
    route: Mapped[str] = mapped_column(String(255), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    status: Mapped[int | None] = mapped_column(Integer)
    """None while the first request runs."""
    body: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[float] = mapped_column(Float)


class Breaker(Base):
    """An operator's word on a kernel, for all jobs (``scope`` is ``all``) or for one."""

    __tablename__ = "breakers"

    kernel: Mapped[str] = mapped_column(String(32), primary_key=True)
    scope: Mapped[str] = mapped_column(String(32), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(String(64))
    changed_at: Mapped[float] = mapped_column(Float)
    epoch: Mapped[int] = mapped_column(Integer)
    expires_at: Mapped[float | None] = mapped_column(Float)
    """When the breaker goes back to closed by itself; None: not before somebody says so."""


class BreakerTransition(Base):
    """A change of a breaker; ``epoch`` counts them over all kernels."""

    __tablename__ = "breaker_transitions"

    epoch: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    kernel: Mapped[str] = mapped_column(String(32))
    scope: Mapped[str] = mapped_column(String(32))
    from_state: Mapped[str] = mapped_column(String(16))
    to_state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(String(64))
    at: Mapped[float] = mapped_column(Float)


class KernelSwap(Base):
    """The swap of a running job's kernel. ``number`` is in one order with the epochs of breakers."""

    __tablename__ = "kernel_swaps"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    number: Mapped[int] = mapped_column(Integer, unique=True)
    attempt: Mapped[int] = mapped_column(Integer)
    target: Mapped[str] = mapped_column(Text)
    deadline_s: Mapped[float] = mapped_column(Float)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    actor: Mapped[str] = mapped_column(String(64))
    requested_at: Mapped[float] = mapped_column(Float)
    changed_at: Mapped[float] = mapped_column(Float)
    epoch: Mapped[int | None] = mapped_column(Integer)
    """Of the ranks, from the change on; None before."""
    step: Mapped[int | None] = mapped_column(_Big)
    """The first that the new kernel did."""
    message: Mapped[str] = mapped_column(Text, default="")


class RuntimeTransition(Base):
    """A move that a job's breaker made by itself."""

    __tablename__ = "runtime_transitions"

    id: Mapped[int] = mapped_column(_Big, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    attempt: Mapped[int] = mapped_column(Integer)
    kernel: Mapped[str] = mapped_column(String(32))
    size_class: Mapped[int] = mapped_column(_Big)
    dtype: Mapped[str] = mapped_column(String(16))
    from_state: Mapped[str] = mapped_column(String(16))
    to_state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    step: Mapped[int] = mapped_column(_Big)
    at: Mapped[float] = mapped_column(Float)


class QuotaRow(Base):
    """What a project may use at once; None is no bound. ``*`` counts for each project without a row."""

    __tablename__ = "quotas"

    project: Mapped[str] = mapped_column(String(64), primary_key=True)
    cpus: Mapped[float | None] = mapped_column(Float)
    gpus: Mapped[float | None] = mapped_column(Float)
    memory_bytes: Mapped[int | None] = mapped_column(_Big)
    jobs: Mapped[int | None] = mapped_column(Integer)
    waiting_jobs: Mapped[int | None] = mapped_column(Integer)
    version: Mapped[int] = mapped_column(Integer)
    actor: Mapped[str] = mapped_column(String(64))
    changed_at: Mapped[float] = mapped_column(Float)


class AuditRow(Base):
    """A request that was to change something, and what came of it. Written with the change, in its transaction."""

    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(_Big, primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(Float, index=True)
    actor: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(Text)
    target: Mapped[str] = mapped_column(Text)
    request_hash: Mapped[str] = mapped_column(String(64))
    """SHA-256 over method, path, query and body."""
    outcome: Mapped[str] = mapped_column(String(64))


class Lease(Base):
    """Who may do a job that only one may do."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    holder: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[float] = mapped_column(Float)
