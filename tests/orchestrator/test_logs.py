"""Laws of reading logs: every byte once, no character cut, wherever a reader left off."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from orchestrator.errors import InvalidInput
from orchestrator.logs import MAX_FILES, MAX_LINE_BYTES, Cursor, LogStore, Selection, split_lines
from worker.contract.logs import attempt_folder, done_file, dropped_file, log_file

AWKWARD = [
    b"plain\n", b"crlf\r\n", b"\r", b"50%\r100%\r\n", "é".encode(), "日本\n".encode(), b"\xff\xfe",
    b"\x1b[31mred\x1b[0m\n", b"\xc3", b"\n", b"\0", b"x" * (MAX_LINE_BYTES + 5),
    "é".encode() * MAX_LINE_BYTES, b"\xf0\x9f",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_however_it_is_read_the_lines_are_those_of_the_whole(seed: int) -> None:
    """Read in pieces that grow at random, as a follower of a growing file does."""
    picks = random.Random(seed)
    data = b"".join(picks.choices(AWKWARD, k=40))
    whole = list(split_lines(data, 0, final=True))
    assert b"".join(data[line.offset : line.next_offset] for line in whole) == data, "no gap and no repeat"
    assert all(len(line.text.encode("utf-8", "replace")) <= 3 * MAX_LINE_BYTES for line in whole)
    known, at, pieces = 0, 0, []
    while at < len(data):
        known = min(len(data), known + picks.choice((1, 2, 3, 700, 20_000)))
        for line in split_lines(data[at:known], at, final=known == len(data)):
            pieces.append(line)
            at = line.next_offset
    assert pieces == whole


def test_characters_are_whole_and_bad_bytes_are_marked() -> None:
    data = "日".encode() * MAX_LINE_BYTES + b"\xff\xc3\n"  # three bytes, of which the limit is no multiple
    lines = list(split_lines(data, 0, final=False))
    assert [line.partial for line in lines] == [True, True, True, False]
    assert "".join(line.text for line in lines) == "日" * MAX_LINE_BYTES + "\ufffd\ufffd"


def test_progress_bars_are_lines() -> None:
    assert [line.text for line in split_lines(b"1%\r2%\r3%\r\ndone\nnot yet", 0, final=False)] == [
        "1%",
        "2%",
        "3%",
        "done",
    ]
    assert list(split_lines(b"1%\r", 0, final=False)) == []  # a line feed may follow
    assert [line.text for line in split_lines(b"1%\r", 0, final=True)] == ["1%"]


def write(store: LogStore, attempt: int, rank: int, stdout: bytes, stderr: bytes = b"", *, done: bool = True) -> None:
    folder = attempt_folder(store.folder("j"), attempt)
    folder.mkdir(parents=True, exist_ok=True)
    log_file(folder, rank, "stdout").write_bytes(stdout)
    log_file(folder, rank, "stderr").write_bytes(stderr)
    if done:
        done_file(folder, rank).touch()


def test_five_megabytes_without_a_line_break_are_read_in_pages(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    write(store, 1, 0, b"x" * 5_000_000 + b"\n", b"e\n")
    write(store, 1, 1, b"other\n")
    cursor, found, pages = Cursor(1), list[tuple[tuple[int, str], str]](), 0
    while True:
        part = store.read("j", cursor, Selection(), limit_bytes=1 << 18, ended=True)
        assert sum(len(line.text) for _, line in part.lines) <= (1 << 18) + 2 * MAX_LINE_BYTES
        found += [(key, line.text) for key, line in part.lines]
        cursor, pages = Cursor.parse(str(part.cursor), "/query/after"), pages + 1
        if part.drained:
            break
    assert sum(len(text) for key, text in found if key == (0, "stdout")) == 5_000_000 and pages >= 19
    assert [text for key, text in found if key != (0, "stdout")] == ["e", "other"]


def test_one_rank_and_one_stream(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    for rank in range(3):
        write(store, 1, rank, b"out\n", b"err\n")
    part = store.read("j", Cursor(1), Selection(rank=1, stream="stderr"), limit_bytes=1000, ended=True)
    assert [(key, line.text) for key, line in part.lines] == [((1, "stderr"), "err")] and part.drained
    dropped_file(attempt_folder(store.folder("j"), 1), 2, "stdout").write_text("17")
    assert store.read("j", Cursor(1), Selection(), limit_bytes=1000, ended=True).dropped == {(2, "stdout"): 17}


def test_what_is_written_later_follows_at_the_cursor(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    write(store, 1, 0, b"one\ntw", done=False)
    part = store.read("j", Cursor(1), Selection(), limit_bytes=1000, ended=False)
    assert [line.text for _, line in part.lines] == ["one"] and not part.drained
    write(store, 1, 0, b"one\ntwo", done=True)
    part = store.read("j", part.cursor, Selection(), limit_bytes=1000, ended=True)
    assert [line.text for _, line in part.lines] == ["two"] and part.drained


def test_cursors_that_nobody_gave_out(tmp_path: Path) -> None:
    for text in ("", "x", "1;", "1;0.stdout=-1", "1;../x.stdout=1", "1;0.stdout=" + "9" * 30, "9" * 70_000):
        with pytest.raises(InvalidInput):
            Cursor.parse(text, "/query/after")
    store = LogStore(tmp_path)
    for rank in range(MAX_FILES):
        write(store, 1, rank, b"")
    with pytest.raises(InvalidInput, match="Name a rank"):
        store.read("j", Cursor(1), Selection(), limit_bytes=10, ended=True)
