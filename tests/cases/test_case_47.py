"""Case 47. Symptom elsewhere: optimizer state lies beside the step's directory, and the next save overwrites it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tests.cases.common import Weights, dedicate, train
from tests.multiproc.checkpointed import make_exchange, resume_from, save_to, whole_state
from worker.checkpoints.state import DmuonState

SHAPES = {"weight": (4, 4), "bias": (4,)}
ROUTES: list[dict[str, object]] = [{"name": "bias", "set": {"route": "adamw"}}]


def _start() -> DmuonState:
    model = Weights(SHAPES)
    return DmuonState(model, dedicate(model, ROUTES))


def _steps(state: DmuonState, begin: int, end: int) -> None:
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step)
        gradients = {name: torch.randn(shape, generator=generator).double() for name, shape in SHAPES.items()}
        train(state.model, state.optimizer, gradients)


def test_an_earlier_step_resumes_from_its_directory_alone(one_rank: None, tmp_path: Path) -> None:
    state = _start()
    for index, (begin, end) in enumerate([(0, 2), (2, 4)]):
        _steps(state, begin, end)
        save_to(tmp_path / "run", state, end, make_exchange(f"save {index}"), token=str(index))
    shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    resumed = _start()
    chosen = resume_from(None, resumed, make_exchange("resume"), tmp_path / "copy")
    assert chosen.manifest.step == 2
    _steps(resumed, 2, 4)
    expected = whole_state(state)
    assert all(torch.equal(value, expected[key]) for key, value in whole_state(resumed).items())
