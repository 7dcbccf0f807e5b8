"""What a rank tells: on disk before anything else, sent again until it is taken."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from worker.actors import _sender
from worker.actors._sender import Sender
from worker.contract.messages import Entry, Milestone
from worker.contract.reports import rank_files
from worker.journal import Journal


class Listener:
    """A supervisor that fails ``failures`` times and says when it has heard ``enough``."""

    def __init__(self, failures: int, enough: int) -> None:
        self.failures, self.enough, self.heard = failures, enough, threading.Event()
        self.numbers: list[int | None] = []
        self.names: list[str] = []
        self.push = self

    def remote(self, _fence: str, batch: list[str], dropped: int) -> None:
        if self.failures:
            self.failures -= 1
            raise TimeoutError
        entries = [Entry.model_validate_json(text) for text in batch]
        assert dropped == 0
        self.numbers += [entry.number for entry in entries]
        self.names += [entry.body.name for entry in entries if isinstance(entry.body, Milestone)]
        if len(self.numbers) >= self.enough:
            self.heard.set()


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        @staticmethod
        def get(answer: Any, timeout: float) -> Any:
            return answer

    monkeypatch.setattr(_sender, "ray", Ray)
    monkeypatch.setattr(_sender, "_AGAIN_S", 0.0)


def note(text: str) -> Milestone:
    return Milestone(name="checkpoint_saved", at=0.0, message=text)


def test_what_was_not_taken_is_sent_again_in_order(tmp_path: Path) -> None:
    listener, journal = Listener(failures=3, enough=40), Journal(rank_files(tmp_path, 2))
    sender = Sender(listener, "fence", 100, 2, journal)
    for number in range(40):
        sender.put(note(str(number)))
    assert listener.heard.wait(20)
    sender.close()
    assert listener.numbers == list(range(1, 41))
    kept = [Entry.model_validate_json(line) for line in rank_files(tmp_path, 2)[0].read_text().splitlines()]
    assert [(entry.rank, entry.number) for entry in kept] == [(2, number) for number in range(1, 41)]


def test_a_full_disk_is_told_once_and_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(rank_files(tmp_path, 0))

    def full(_text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "append", full)
    listener = Listener(failures=0, enough=3)
    sender = Sender(listener, "fence", 100, 0, journal)
    sender.put(note("a"))
    sender.put(note("b"))
    assert listener.heard.wait(20)
    sender.close()
    assert listener.names == ["checkpoint_saved", "reports_off", "checkpoint_saved"]
