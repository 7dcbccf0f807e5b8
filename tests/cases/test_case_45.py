"""Case 45. Symptom elsewhere: killed in the middle of a save, a half-written directory is chosen as the latest."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.worker.saved import PlainState, resume, save
from tests.worker.test_checkpoints_crash import POINTS, die, run_child
from worker.checkpoints import CheckpointError


@pytest.mark.parametrize("point", POINTS)
def test_resume_takes_the_newest_complete_one(tmp_path: Path, point: str) -> None:
    """Killed by SIGKILL; what was being written is refused when it is asked for by name."""
    save(tmp_path, 1)
    assert run_child(die, tmp_path, point, 2, 1) == -signal.SIGKILL
    assert resume(tmp_path, PlainState()) == (2 if point in ("pointer", "retention") else 1)
    for partial in tmp_path.glob(".partial-*-killed"):
        if point == "rename":
            continue  # whole but for its name
        with pytest.raises(CheckpointError, match=r"no manifest|holds no complete one"):
            resume(None, PlainState(), explicit=partial)
    save(tmp_path, 2)
    assert resume(tmp_path, PlainState()) == 2
    assert not list(tmp_path.glob(".partial-*"))
