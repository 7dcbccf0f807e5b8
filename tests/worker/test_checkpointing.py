"""Where a run's checkpoints go, and what becomes of a place that not all nodes share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.worker.saved import PlainState
from tests.worker.specs import tiny_spec
from worker import checkpointing
from worker.checkpointing import RunCheckpoints, open_checkpoints, spec_digest
from worker.checkpoints import CheckpointError
from worker.checkpoints.storage import sees_lock
from worker.contract.errors import SpecInvalid
from worker.contract.messages import Milestone
from worker.control import Mailbox
from worker.corpus import Corpus
from worker.seat import Rank
from worker.settings import WorkerSettings

CORPUS = Corpus(np.zeros(100, dtype=np.uint8), "test", 1, 32, 256)


def _open(
    folder: Path, given: Path | None, **checkpoint: Any
) -> tuple[list[RunCheckpoints | CheckpointError], list[str]]:
    """Open on two ranks, each in a thread; return what each came to, and what was told."""
    store, told = dist.HashStore(), list[str]()
    found: dict[int, RunCheckpoints | CheckpointError] = {}
    settings = WorkerSettings(data_directory=folder / "data")

    def run(number: int) -> None:
        seat = Rank(
            tiny_spec(2, checkpoint=checkpoint), number, torch.device("cpu"), store, settings, Mailbox(),
            lambda body: told.append(cast(Milestone, body).name), checkpoint_directory=given,
        )  # fmt: skip
        try:
            found[number] = open_checkpoints(seat, PlainState(), CORPUS, "plan")
            found[number].close()
        except CheckpointError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), name=f"rank {number}") for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[0], found[1]], told


def _places(results: list[RunCheckpoints | CheckpointError]) -> set[Path | None]:
    assert not [result for result in results if isinstance(result, CheckpointError)], results
    opened = cast("list[RunCheckpoints]", results)
    return {None if result.saver is None else result.saver.directory for result in opened}


def test_where_checkpoints_go(tmp_path: Path) -> None:
    """What the spec says, else what the control plane says, else one's own place, and that only when asked to save."""
    given = tmp_path / "given"
    assert _places(_open(tmp_path, given, directory=str(tmp_path / "spec"))[0]) == {tmp_path / "spec"}
    assert _places(_open(tmp_path, given)[0]) == {given}
    assert _places(_open(tmp_path, None, every_steps=5)[0]) == {tmp_path / "data" / "checkpoints" / "tiny"}
    assert _places(_open(tmp_path, None)[0]) == {None}


def test_a_place_that_not_all_nodes_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up, which is told, when nobody asked for it; and refused on every rank when somebody did."""
    blind = lambda directory, token: threading.current_thread().name == "rank 0" and sees_lock(directory, token)  # noqa: E731
    monkeypatch.setattr(checkpointing, "sees_lock", blind)
    results, told = _open(tmp_path, tmp_path / "given")
    assert _places(results) == {None} and told == ["checkpoints_off"]
    results, told = _open(tmp_path, None, directory=str(tmp_path / "asked"))
    assert [str(result) for result in results] == [str(results[0])] * 2 and not told
    assert "ranks 1 do not see" in str(results[0]) and "that all nodes share" in str(results[0])


def test_a_place_that_is_taken_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    results, _ = _open(tmp_path, None, directory=str(tmp_path / "file" / "below"))
    assert all("cannot be written" in str(result) for result in results)


def test_the_digest_is_of_what_decides_the_numbers() -> None:
    one = tiny_spec(checkpoint={"every_steps": 3}, labels={"a": "b"})
    assert spec_digest(one) == spec_digest(tiny_spec())
    assert spec_digest(one) != spec_digest(tiny_spec(training={"steps": 6, "global_batch": 12}))


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({"every_steps": 0}, "/checkpoint/every_steps"),
        ({"keep": 0}, "/checkpoint/keep"),
        ({"resume": "nevr"}, "workers need absolute paths, found resume 'nevr'"),
        ({"directory": "here"}, "workers need absolute paths, found directory 'here'"),
        ({"on_route_change": "maybe"}, "/checkpoint/on_route_change"),
        ({"every": 5}, "Did you mean 'every_steps'?"),
    ],
)
def test_a_section_that_means_nothing_is_refused(checkpoint: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        tiny_spec(checkpoint=checkpoint)
    assert said in str(caught.value)
