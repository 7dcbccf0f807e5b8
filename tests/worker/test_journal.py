"""Files that outlive who writes them: bounded, locked while more may come, and whole after SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from worker.contract.reports import rank_files
from worker.journal import Journal

_TELLS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from worker.contract.reports import rank_files
from worker.journal import Journal
journal = Journal(rank_files(Path(sys.argv[1]), 0))
for number in range(1000):
    journal.append(str(number))
os.kill(os.getpid(), signal.SIGKILL)
"""


def lines(folder: Path) -> list[int]:
    return sorted(int(line) for path in rank_files(folder, 0) for line in path.read_text().split())


def test_at_least_the_limit_is_kept_and_at_most_twice_that(tmp_path: Path) -> None:
    journal = Journal(rank_files(tmp_path, 0), limit_bytes=1000)
    for number in range(1000, 3000):
        journal.append(str(number))
        kept = lines(tmp_path)
        assert kept == list(range(kept[0], number + 1)), "the newest, without a gap"
        assert kept[0] == 1000 or 1000 <= 5 * len(kept) <= 2000
    journal.close()


def test_what_was_told_survives_sigkill(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _TELLS_AND_DIES, str(tmp_path)]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert lines(tmp_path) == list(range(1000))
    Journal(rank_files(tmp_path, 0)).close()  # its lock died with it


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    first = Journal(rank_files(tmp_path, 0))
    with pytest.raises(BlockingIOError):
        Journal(rank_files(tmp_path, 0))
    first.close()
    assert os.stat(rank_files(tmp_path, 0)[0]).st_mode & 0o077 == 0
