"""Laws of the store: one table of moves, idempotent appends, writers that wait for each other."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, func, select

from orchestrator.errors import IdempotencyMismatch, IdempotencyRunning, LeaseLost, StaleWrite, StoreUnusable
from orchestrator.store import database as database_module
from orchestrator.store.attempts import append_batch, attempt_by_id, new_attempt, reports_at, totals_of
from orchestrator.store.database import Database
from orchestrator.store.idempotency import Answer, KeyedRequest, begin, finish
from orchestrator.store.jobs import JobFilter, events_after, find_job, list_jobs, submit_job
from orchestrator.store.leases import acquire, release
from orchestrator.store.models import Attempt, Base, Event, Job, RankReportRow
from orchestrator.store.transitions import LEASE, Guard, add_event, change_state, locked_job
from tests.orchestrator.fakes import make_report, make_spec
from tests.orchestrator.postgres import Postgres
from worker.contract.messages import Entry, Milestone, PollBatch
from worker.contract.states import TRANSITIONS, IllegalTransition, JobState, Reason


def submitted(database: Database) -> Job:
    with database.write() as session:
        return submit_job(session, make_spec(), now=1.0)


def test_migration_makes_the_tables_of_the_models(database: Database) -> None:
    database.migrate()  # again: nothing happens
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_every_released_schema_is_brought_forward(empty_url: str) -> None:
    """A job of each release is there after the migration, and the tables are those of the models."""
    database = Database(empty_url)
    for number, revision in enumerate(database.revisions(), 1):
        with database.engine.begin() as connection:
            _drop_everything(connection)
        database.migrate(revision)
        tables = MetaData()
        tables.reflect(database.engine)
        job = {
            "id": f"old{number}", "name": "n", "project": "p", "spec": make_spec().model_dump_json(), "state": "QUEUED",
            "version": 1, "message": "", "field_errors": "[]", "created_at": 1.0, "state_since": 1.0, "last_event": 1,
        }  # fmt: skip
        event = {"job_id": job["id"], "seq": 1, "at": 1.0, "kind": "submitted", "message": "", "data": "{}"}
        with database.engine.begin() as connection:
            connection.execute(tables.tables["jobs"].insert(), job)
            connection.execute(tables.tables["events"].insert(), event)
        database.migrate()
        with database.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == [], revision
        with database.read() as session:
            assert find_job(session, f"old{number}").state == "QUEUED"
            assert [row.kind for row in events_after(session, f"old{number}", 0, 9)] == ["submitted"]
    database.close()


def _drop_everything(connection: Connection) -> None:
    tables = MetaData()
    tables.reflect(connection)
    tables.drop_all(connection)


def test_a_database_of_a_newer_release_is_refused(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreUnusable, match="9999, newer"):
        database.migrate()


def test_text_that_a_database_does_not_take(database: Database) -> None:
    with database.write() as session:
        job = submit_job(session, make_spec(), now=1.0)
        add_event(session, job, "note", "a\0b\ud800c", now=1.0)
    with database.read() as session:
        assert events_after(session, job.id, 1, 1)[0].message == "a\N{REPLACEMENT CHARACTER}b?c"
        assert list_jobs(session, JobFilter(project="\0"), page_size=1, page_token=None) == ([], None)


def test_a_reader_sees_one_state(database: Database) -> None:
    job = submitted(database)
    with database.read() as session:
        assert len(events_after(session, job.id, 0, 9)) == 1
        with database.write() as other:
            add_event(other, locked_job(other, job.id), "note", "", now=2.0)
        assert len(events_after(session, job.id, 0, 9)) == 1


def test_connections_that_the_server_ended_are_replaced(postgres: Postgres) -> None:
    database = Database(postgres.migrated())
    job = submitted(database)
    postgres.drop_connections()
    with database.read() as session:
        assert find_job(session, job.id).state == "SUBMITTED"
    database.close()


def test_settings_of_sqlite_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(database_module._PRAGMAS, "page_size", 12345)
    with pytest.raises(StoreUnusable, match="page_size"):
        Database(f"sqlite:///{tmp_path / 'y.db'}").migrate()


def test_only_moves_of_the_table_are_made(database: Database) -> None:
    for old, new in itertools.product(JobState, JobState):
        job = submitted(database)
        with database.write() as session:
            locked_job(session, job.id).state = old
        if new in TRANSITIONS[old]:
            with database.write() as session:
                change_state(session, job.id, new, guard=Guard(1), now=2.0)
            expected, number = new, 2
        else:
            with pytest.raises(IllegalTransition), database.write() as session:
                change_state(session, job.id, new, guard=Guard(1), now=2.0)
            expected, number = old, 1
        with database.read() as session:
            found = find_job(session, job.id)
            assert (found.state, found.version) == (expected, number), (old, new)
            assert len(events_after(session, job.id, 0, 10)) == number
            assert (found.finished_at is not None) == (number == 2 and new.terminal)


def test_a_write_that_was_decided_on_an_old_row_is_refused(database: Database) -> None:
    job = submitted(database)
    with database.write() as session:
        change_state(session, job.id, JobState.QUEUED, guard=Guard(1), now=2.0)
    with pytest.raises(StaleWrite), database.write() as session:
        change_state(session, job.id, JobState.CANCELLED, guard=Guard(1), now=2.0, reason=Reason.CANCELLED)


def test_cancel_and_finish_at_the_same_moment_leave_one_end(database: Database) -> None:
    job = submitted(database)
    with database.write() as session:
        locked_job(session, job.id).state = JobState.STOPPING
    barrier, errors = threading.Barrier(2), []

    def end(new: JobState) -> None:
        barrier.wait()
        try:
            with database.write() as session:
                change_state(session, job.id, new, guard=Guard(1), now=2.0)
        except StaleWrite as error:
            errors.append(error)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(end, (JobState.CANCELLED, JobState.SUCCEEDED)))
    assert len(errors) == 1
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(Event).where(Event.kind == "state")) == 1


def test_the_lease_guards_writes(database: Database) -> None:
    job = submitted(database)
    with database.write() as session:
        assert acquire(session, LEASE, "a", now=0.0, duration_s=5.0)
        assert not acquire(session, LEASE, "b", now=4.0, duration_s=5.0)
    with database.write() as session:
        assert acquire(session, LEASE, "b", now=6.0, duration_s=5.0)
    with pytest.raises(LeaseLost), database.write() as session:
        change_state(session, job.id, JobState.QUEUED, guard=Guard(1, "a"), now=6.0)
    with database.write() as session:
        release(session, LEASE, "a")  # not its own
        change_state(session, job.id, JobState.QUEUED, guard=Guard(1, "b"), now=6.0)


def test_appending_is_idempotent(database: Database) -> None:
    job = submitted(database)
    entries = tuple(
        Entry(seq=number + 1, body=make_report(rank, step))
        for number, (step, rank) in enumerate((s, k) for s in (1, 2, 3) for k in (0, 1))
    )
    with database.write() as session:
        attempt_id = new_attempt(session, locked_job(session, job.id), now=2.0, epoch=0).id
    counts = []
    for part in (entries[:3], entries[:4], entries[2:], entries):
        with database.write() as session:
            batch = PollBatch(entries=part, dropped=7, alive_ranks=2, ended=False)
            row = attempt_by_id(session, attempt_id)
            counts.append(append_batch(session, locked_job(session, job.id), row, batch))
    assert counts == [3, 1, 2, 0]
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(RankReportRow)) == 6
        assert [report.rank for report in reports_at(session, attempt_id, 3)] == [0, 1]
        totals = totals_of(session, [attempt_id])[attempt_id]
        assert {rank: report.step for rank, report in totals.items()} == {0: 3, 1: 3}
        assert session.get_one(Attempt, attempt_id).dropped == 7


def test_what_a_rank_told_twice_is_stored_once_whatever_the_outbox_numbers_it(database: Database) -> None:
    job = submitted(database)
    with database.write() as session:
        attempt_id = new_attempt(session, locked_job(session, job.id), now=2.0, epoch=0).id
    told = Milestone(name="checkpoint_saved", at=3.0, message="step 10", rank=1)
    for seq, number in ((1, 4), (2, 4), (3, 3), (4, 5)):
        with database.write() as session:
            entry = Entry(seq=seq, rank=1, number=number, body=told)
            batch = PollBatch(entries=(entry,), dropped=0, alive_ranks=2, ended=False)
            append_batch(session, locked_job(session, job.id), attempt_by_id(session, attempt_id), batch)
    with database.read() as session:
        kinds = [event.kind for event in events_after(session, job.id, 0, 100)]
        assert kinds.count("checkpoint_saved") == 2, kinds
        assert session.get_one(Attempt, attempt_id).cursor == 4


def test_a_loss_that_is_no_number_survives(database: Database) -> None:
    job = submitted(database)
    with database.write() as session:
        row = new_attempt(session, locked_job(session, job.id), now=2.0, epoch=0)
        entry = Entry(seq=1, body=make_report(0, 1, loss=float("nan")))
        batch = PollBatch(entries=(entry,), dropped=0, alive_ranks=1, ended=False)
        append_batch(session, locked_job(session, job.id), row, batch)
        attempt_id = row.id
    with database.read() as session:
        assert str(totals_of(session, [attempt_id])[attempt_id][0].loss) == "nan"


def test_case_7_many_writers_that_read_first(database: Database) -> None:
    def submit_and_claim(number: int) -> str:
        with database.write() as session:
            assert session.scalar(select(func.count()).select_from(Job)) is not None
            job = submit_job(session, make_spec(), now=float(number))
        with database.write() as session:
            row = locked_job(session, job.id)
            change_state(session, job.id, JobState.QUEUED, guard=Guard(row.version), now=float(number))
        return job.id

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(submit_and_claim, range(50)))
    assert len(set(found)) == 50


def test_idempotency_keys(database: Database) -> None:
    request = KeyedRequest.of("me", "POST /v1/jobs", "k", "", b"body")
    other = KeyedRequest.of("me", "POST /v1/jobs", "k", "", b"other")
    with database.write() as session:
        assert begin(session, request, now=1.0) is None
    with pytest.raises(IdempotencyRunning), database.write() as session:
        begin(session, request, now=2.0)
    with pytest.raises(IdempotencyMismatch), database.write() as session:
        begin(session, other, now=2.0)
    with database.write() as session:
        finish(session, request, Answer(201, "{}"))
    with database.write() as session:
        assert begin(session, request, now=3.0) == Answer(201, "{}")


def test_a_key_whose_server_died_is_freed(database: Database) -> None:
    request = KeyedRequest.of("me", "POST /v1/plans", "k", "", b"body")
    with database.write() as session:
        begin(session, request, now=1.0)
    with database.write() as session:
        assert begin(session, request, now=1000.0) is None


def test_a_url_that_cannot_be_read_is_refused_without_being_repeated() -> None:
    with pytest.raises(StoreUnusable, match="URL cannot be read; expected sqlite") as refused:
        Database("my secret")
    assert "secret" not in str(refused.value)
