"""Numbers without gaps, a bound with a count, and nothing after the end."""

from __future__ import annotations

from worker.contract.messages import AttemptEnd, Milestone
from worker.contract.states import Reason
from worker.outbox import Outbox


def note(text: str) -> Milestone:
    return Milestone(name="placed", at=0.0, message=text)


def end() -> AttemptEnd:
    return AttemptEnd(at=0.0, reason=Reason.COMPLETED, message="")


def test_reading_again_gives_the_same_and_a_cursor_forgets() -> None:
    outbox = Outbox(10)
    for text in "abc":
        outbox.append(note(text))
    first = outbox.read(0, 2, 1)
    assert [entry.seq for entry in first.entries] == [1, 2]
    assert outbox.read(0, 2, 1) == first
    assert [entry.seq for entry in outbox.read(2, 10, 1).entries] == [3]
    assert outbox.read(3, 10, 1).entries == ()
    assert first.dropped == 0


def test_a_full_outbox_drops_the_oldest_and_counts() -> None:
    outbox = Outbox(2)
    for text in "abcd":
        outbox.append(note(text))
    batch = outbox.read(0, 10, 0)
    assert [entry.seq for entry in batch.entries] == [3, 4]
    assert batch.dropped == 2


def test_the_end_is_the_last_entry() -> None:
    outbox = Outbox(10)
    outbox.append(end())
    outbox.append(note("late"))
    batch = outbox.read(0, 10, 0)
    assert [entry.body.kind for entry in batch.entries] == ["end"]
    assert batch.ended and batch.dropped == 1


def test_what_a_rank_tells_twice_is_taken_once_and_kept_by_itself() -> None:
    kept: list[str] = []
    outbox = Outbox(10, kept.append)
    assert [outbox.append(note(text), 3, number) for text, number in (("a", 1), ("b", 2), ("a", 1), ("b", 2))] == [
        True, True, False, False,
    ]  # fmt: skip
    assert outbox.append(note("of another rank"), 4, 1) and outbox.append(note("its own"))
    batch = outbox.read(0, 10, 0)
    assert [(entry.seq, entry.rank, entry.number) for entry in batch.entries] == [
        (1, 3, 1), (2, 3, 2), (3, 4, 1), (4, None, None),
    ]  # fmt: skip
    assert kept == [batch.entries[3].model_dump_json()] and batch.dropped == 0
