"""Case 55: a follower of a log crashes on half a character, and progress bars make one endless line."""

from __future__ import annotations

from pathlib import Path

from orchestrator.logs import MAX_LINE_BYTES, Cursor, LogStore, Selection
from worker.contract.logs import attempt_folder, done_file, log_file


def test_a_follower_reads_what_grows_byte_by_byte(tmp_path: Path) -> None:
    """Whatever the bytes are and wherever the reads fall: whole characters, bounded lines, nothing twice or lost."""
    data = (
        "é".encode()
        + b"\xff\xfe\n"
        + b"10%\r20%\r\n"
        + b"\x1b[31mred\x1b[0m\n"
        + b"x" * (MAX_LINE_BYTES + 10)
        + b"\nend"
    )
    store = LogStore(tmp_path)
    folder = attempt_folder(store.folder("job"), 1)
    folder.mkdir(parents=True)
    path, cursor, texts, covered = log_file(folder, 0, "stdout"), Cursor(1), list[str](), 0
    cuts = [*range(1, 40), MAX_LINE_BYTES, MAX_LINE_BYTES + 60, len(data)]
    for cut in cuts:
        path.write_bytes(data[:cut])
        if cut == len(data):
            done_file(folder, 0).touch()
        part = store.read(
            "job", Cursor.parse(str(cursor), "/query/after"), Selection(), limit_bytes=1 << 20, ended=False
        )
        for _, line in part.lines:
            assert line.offset == covered
            covered = line.next_offset
            texts.append(line.text)
        cursor = part.cursor
    assert covered == len(data)
    assert texts[:4] == ["é\ufffd\ufffd", "10%", "20%", "\x1b[31mred\x1b[0m"]
    assert "".join(texts[4:]) == "x" * (MAX_LINE_BYTES + 10) + "end"
