"""What a rank writes is on disk, whatever becomes of the rank."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from worker.contract.logs import attempt_folder, done_file, dropped_file, log_file
from worker.log_pump import TAIL_BYTES, Keeper

QUOTA = 100_000
RANK = f"""
import os, signal, subprocess, sys
from pathlib import Path
from worker.log_capture import capture_output
capture_output(Path(sys.argv[1]), 3, 1, {QUOTA})
print("one line, and a half: \\ud800", end="")
os.write(1, b"\\xff\\xfe raw\\n")
subprocess.run(["sh", "-c", "echo a child speaks >&2"])
if sys.argv[2] == "flood":
    for number in range(4):
        sys.stderr.write("x" * 99_999 + "\\n")
sys.stderr.write("last words\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_rank(folder: Path, what: str) -> Path:
    """Run a rank that kills itself, wait until its pump has ended, and return its folder."""
    found = subprocess.run([sys.executable, "-c", RANK, str(folder), what], capture_output=True)
    assert found.returncode == -9 and found.stdout == found.stderr == b"", found
    deadline = time.monotonic() + 10
    while not done_file(attempt_folder(folder, 3), 1).exists():
        assert time.monotonic() < deadline, "the pump did not end"
        time.sleep(0.01)
    return attempt_folder(folder, 3)


def test_bytes_come_to_disk_as_they_were_written(tmp_path: Path) -> None:
    folder = run_rank(tmp_path, "quiet")
    assert log_file(folder, 1, "stdout").read_bytes() == b"one line, and a half: \\ud800\xff\xfe raw\n"
    assert log_file(folder, 1, "stderr").read_bytes() == b"a child speaks\nlast words\n"
    assert not dropped_file(folder, 1, "stderr").exists()
    assert log_file(folder, 1, "stdout").stat().st_mode & 0o077 == 0


def test_a_flood_is_cut_and_counted_and_its_end_is_kept(tmp_path: Path) -> None:
    folder = run_rank(tmp_path, "flood")
    kept = log_file(folder, 1, "stderr").read_bytes()
    dropped = int(dropped_file(folder, 1, "stderr").read_text())
    written = len(b"a child speaks\n") + 4 * 100_000 + len(b"last words\n")
    mark = f"\n[{dropped} bytes are missing here: the quota of {QUOTA} bytes was reached]\n".encode()
    assert kept[QUOTA:].startswith(mark) and kept.endswith(b"x\nlast words\n")
    assert len(kept) - len(mark) + dropped == written, "every byte was kept or counted"
    assert len(kept) <= QUOTA + TAIL_BYTES + len(mark)
    assert log_file(folder, 1, "stdout").read_bytes().endswith(b" raw\n"), "the other stream has its own quota"


def test_a_full_disk_is_counted(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    keeper = Keeper(str(tmp_path / "full"), 1000)
    keeper.take(b"x" * 500)
    keeper.close()
    assert (tmp_path / "full.dropped").read_text() == "500"
