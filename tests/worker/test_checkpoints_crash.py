"""Killed at any point, out of room, or not allowed to write: what was complete stays complete, and is found."""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.worker.saved import PlainState, facts, half_state, make_saver, save, step_in
from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.storage import (
    POINTER,
    find_checkpoints,
    lock_directory,
    newest_complete,
    no_fault,
    sees_lock,
)

POINTS = ["write", "file", "rename", "pointer", "retention"]


def run_child(body: Callable[..., None], *args: object) -> int | None:
    """Run ``body`` in a process of its own; return its exit code, negative for a signal."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "dmuon_runtime"])
    process = context.Process(target=body, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def die(directory: Path, at: str, step: int, keep: int) -> None:
    """Save, and be killed by SIGKILL at a point."""

    def fault(point: str) -> None:
        if point == at:
            os.kill(os.getpid(), signal.SIGKILL)

    state = PlainState()
    state.fill(step)
    saver = make_saver(directory, keep=keep, fault=fault, token="killed")
    saver.save(state.parts(), facts(state, step))


def _found(directory: Path) -> list[int]:
    complete, broken = find_checkpoints(directory)
    assert not broken, "what has a checkpoint's name is one"
    return [step_in(info.path) for info in complete]


@pytest.mark.parametrize("point", POINTS)
def test_killed_while_saving(tmp_path: Path, point: str) -> None:
    save(tmp_path, 1, 2)
    assert run_child(die, tmp_path, point, 3, 2) == -signal.SIGKILL
    late = point in ("pointer", "retention")
    assert _found(tmp_path)[0] == (3 if late else 2)
    save(tmp_path, 3, keep=2)
    assert _found(tmp_path) == [3, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000003"]
    assert (tmp_path / POINTER).read_text() == "step-00000003"


@pytest.mark.parametrize("point", POINTS)
def test_killed_while_the_only_one_is_replaced_by_the_same_step(tmp_path: Path, point: str) -> None:
    """With nothing else to fall back on, there is a sound checkpoint of the step at any moment."""
    save(tmp_path, 4, keep=1)
    assert run_child(die, tmp_path, point, 4, 1) == -signal.SIGKILL
    assert 4 in _found(tmp_path)
    save(tmp_path, 4, keep=1)
    assert _found(tmp_path) == [4]


def test_killed_in_the_first_save(tmp_path: Path) -> None:
    assert run_child(die, tmp_path, "rename", 1, 1) == -signal.SIGKILL
    assert newest_complete(tmp_path) is None
    save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def _fill_up(directory: Path, rows: int, limit: int) -> None:
    """Save where the system lets no file grow beyond ``limit`` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    told: list[str] = []
    state, saver = PlainState(rows=rows), make_saver(directory, told=told)
    saver.save(state.parts(), facts(state, 2))
    assert told and told[0].startswith("failed 2: ") and "File too large" in told[0], told
    with pytest.raises(CheckpointError, match=r"step 2 could not be written.*File too large"):
        saver.require()


@pytest.mark.parametrize(("rows", "limit"), [(4096, 20_000), (4, 1_200)], ids=["in the tensors", "in the manifest"])
def test_no_room(tmp_path: Path, rows: int, limit: int) -> None:
    """The system itself refuses to write; nothing is left of the attempt, and the earlier checkpoint is untouched."""
    save(tmp_path, 1)
    assert run_child(_fill_up, tmp_path, rows, limit) == 0
    assert _found(tmp_path) == [1]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def _without_rights(directory: Path) -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*name another checkpoint.directory"):
        lock_directory(directory / "new", "token")
    with pytest.raises(CheckpointError, match="Permission denied"):
        lock_directory(directory, "token")
    told: list[str] = []
    state, saver = PlainState(), make_saver(directory, told=told)
    saver.save(state.parts(), facts(state, 2))
    assert told and "Permission denied" in told[0], told


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    place = tmp_path / "place"
    save(place, 1)
    place.chmod(0o555)
    for parent in [tmp_path, *tmp_path.parents][:3]:
        os.chmod(parent, os.stat(parent).st_mode | 0o055)
    assert run_child(_without_rights, place) == 0
    place.chmod(0o755)
    assert _found(place) == [1]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    lock = lock_directory(tmp_path / "new", "first")
    assert sees_lock(tmp_path / "new", "first") and not sees_lock(tmp_path, "first")
    with pytest.raises(CheckpointError, match="another run"):
        lock_directory(tmp_path / "new", "second")
    os.close(lock)
    os.close(lock_directory(tmp_path / "new", "second"))


def test_retention_keeps_what_is_whole(tmp_path: Path) -> None:
    """A damaged checkpoint does not count: with one to keep, the last good one stays beside it."""
    save(tmp_path, 1, 2, 3, keep=2)
    assert _found(tmp_path) == [3, 2]
    (tmp_path / "step-00000003" / "rank-00000.safetensors").write_bytes(b"short")
    save(tmp_path, 4, keep=2)
    complete, broken = find_checkpoints(tmp_path)
    assert [info.step for info in complete] == [4, 2] and len(broken) == 1


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    """A run that went back to an earlier step has left the later ones behind."""
    save(tmp_path, 2, 9)
    save(tmp_path, 4)
    newest = newest_complete(tmp_path)
    assert newest is not None and newest.step == 4


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """The call returns while the writer is held up; what is changed meanwhile is not in the checkpoint."""
    held, reached = threading.Event(), threading.Event()

    def fault(point: str) -> None:
        if point == "file":
            reached.set()
            assert held.wait(30)

    told: list[str] = []
    state, saver = PlainState(), make_saver(tmp_path, asynchronous=True, fault=fault, told=told)
    state.fill(1)
    saver.save(state.parts(), facts(state, 1))
    assert reached.wait(30) and told == [] and newest_complete(tmp_path) is None
    state.fill(7)
    held.set()
    saver.require()
    assert told == ["saved 1"] and _found(tmp_path) == [1]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), AssertionError("a mistake of ours")])
@pytest.mark.parametrize("point", ["write", "file", "rename", "pointer", "retention"])
def test_a_failed_save_is_told_and_the_next_one_is_tried(tmp_path: Path, point: str, error: Exception) -> None:
    def fault(reached: str) -> None:
        if reached == point and armed:
            armed.clear()
            raise error

    save(tmp_path, 1, 2)
    armed = ["once"]
    told: list[str] = []
    state, saver = PlainState(), make_saver(tmp_path, asynchronous=True, fault=fault, told=told)
    for step in (3, 4):
        state.fill(step)
        saver.save(state.parts(), facts(state, step))
    saver.require()
    assert told[0].startswith("failed 3: ") and str(error) in told[0] and told[1] == "saved 4"
    assert _found(tmp_path)[:2] == ([4, 3] if point in ("pointer", "retention") else [4, 2])


def test_what_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    """Two ranks, each in a thread: the reason reaches both, and the next save of the same step is whole."""

    def fault(point: str) -> None:
        if point == "file":
            raise OSError(28, "No space left on device")

    store, told = dist.HashStore(), list[str]()
    for number, faults in enumerate([(no_fault, fault), (no_fault, no_fault)]):
        savers = [
            make_saver(
                tmp_path, told=told, exchange=Exchange(store, rank, 2, 30.0), fault=faults[rank], token=str(number)
            )
            for rank in (0, 1)
        ]
        halves = [half_state(rank) for rank in (0, 1)]
        threads = [
            threading.Thread(target=saver.save, args=(half, facts(PlainState(), 2)))
            for saver, half in zip(savers, halves, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for saver in savers if number == 0 else ():
            with pytest.raises(CheckpointError, match=r"rank 1: OSError: \[Errno 28\] No space left"):
                saver.require()
    assert [word.split(":")[0] for word in told] == ["failed 2", "saved 2"]
    assert _found(tmp_path) == [2]
