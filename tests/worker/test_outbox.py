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
