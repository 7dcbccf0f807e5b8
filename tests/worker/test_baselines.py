"""A baseline through the whole loop, on shards; other meshes are held to one process in ``tests/multiproc``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.specs import tiny_spec
from worker.contract.load import load_spec
from worker.contract.messages import Milestone, RankReport
from worker.contract.states import Reason
from worker.local import Body, run_local


def test_the_document_is_kept_whole() -> None:
    spec = tiny_spec(optimizer={"kind": "muon", "adamw_name_hints": ["up_proj"]})
    assert load_spec(spec.model_dump_json()) == spec


@pytest.mark.multiproc
def test_a_baseline_reports_what_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told: list[Body] = []
    optimizer = {"kind": "muon", "weight_decay_exclude_1d": True}
    training: dict[str, Any] = {"steps": 4, "global_batch": 8, "micro_batch": 2, "clip_grad_norm": 1.0}
    training["schedule"] = {"kind": "linear", "warmup_steps": 2}
    checkpoint = {"directory": str(tmp_path / "checkpoints")}
    spec = tiny_spec(2, optimizer=optimizer, training=training, checkpoint=checkpoint)
    end = run_local(spec, told.append, save=tmp_path / "weights.pt")
    assert end.reason == Reason.COMPLETED, end
    milestones = [body.name for body in told if isinstance(body, Milestone)]
    assert milestones == ["group_formed", "plan_confirmed", "checkpoint_saved"], "no route is claimed to be verified"
    reports = [body for body in told if isinstance(body, RankReport) and body.rank == 0]
    assert [entry.step for entry in reports] == [1, 2, 3, 4] and reports[-1].loss < reports[0].loss
    assert all(entry.grad_norm is not None and not entry.skipped for entry in reports)
    assert [entry.lr["muon"] for entry in reports] == pytest.approx([0.01, 0.02, 0.01, 0.0])
    assert [entry.lr["adamw"] for entry in reports] == pytest.approx([0.0005, 0.001, 0.0005, 0.0])
    last = reports[-2]
    assert last.ns == () == last.comm
    assert last.kernel is last.kernel_epoch is last.owner_compute_seconds is last.ns_orthogonality_error is None
    assert {entry.route for entry in last.routes if entry.update_square_sum > 0} == {"muon", "adamw"}
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert state["model.layers.0.mlp.up_proj.weight"].shape == (64, 32)

    told.clear()
    more = tiny_spec(optimizer=optimizer, training=training | {"steps": 6}, checkpoint=checkpoint)
    assert run_local(more, told.append).reason == Reason.COMPLETED
    assert "resumed" in {body.name for body in told if isinstance(body, Milestone)}
    assert [body.step for body in told if isinstance(body, RankReport)] == [5, 6], (
        "one worker goes on where two stopped"
    )
