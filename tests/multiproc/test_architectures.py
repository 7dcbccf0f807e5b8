"""Nine real architectures, everything under the runtime on two ranks: three steps equal one process."""

from __future__ import annotations

import traceback

import pytest
import torch

import dmuon_runtime as dmuon
from tests.multiproc.architectures import ARCHITECTURES
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, hold_to_reference

pytestmark = pytest.mark.multiproc


def _train(names: list[str]) -> None:
    failures = []
    for name in names:
        architecture = ARCHITECTURES[name]
        setting = Setting(
            steps=3,
            policy=architecture.policy(),
            tolerance=1e-6,
            make_boundary=architecture.boundary if architecture.blocks else None,
        )
        try:
            run = hold_to_reference(architecture.backward, setting, architecture.build)
            counted, plan = dmuon.get_counters(run.model).snapshot(), dmuon.get_plan(run.model)
            for key, predicted in plan.traffic.items():
                assert counted.comm[key].payload_bytes == 3 * predicted.payload_bytes, f"{key}: {counted.comm[key]}"
            assert all(bool(torch.isfinite(value).all()) for value in dmuon.get_model_state_dict(run.model).values())
        except Exception:
            failures.append(f"{name}: {traceback.format_exc()}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("names", [["llama", "qwen3", "gemma", "mixtral", "gpt2"], ["bert", "vit", "t5", "mamba"]])
def test_three_steps_equal_one_process(names: list[str]) -> None:
    """Rotary and learned positions, tied heads, experts, transposed weights, convolutions, two stacks, state spaces.

    Double precision weights; the tolerance allows for models that compute their norms in single precision.
    """
    run_ranks(2, _train, names, deadline_s=120)
