"""A run that was broken off and resumed is the run that was not, step for step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.alone import Run, run_alone
from tests.worker.specs import tiny_document, tiny_spec
from worker.__main__ import main
from worker.checkpoints import CheckpointError, newest_complete
from worker.checkpoints.storage import read_manifest
from worker.contract.kernels import Algorithm, CoefficientSet, Kernel, KernelPolicy, KernelTarget
from worker.contract.load import validate_spec
from worker.contract.messages import RankReport
from worker.contract.spec import JobSpec
from worker.contract.states import Reason
from worker.local import Body, run_local
from worker.train import Outcome

STEPS = 6


def _spec(checkpoint: dict[str, Any] | None = None, steps: int = STEPS, **sections: Any) -> JobSpec:
    """A Llama with dropout, and a warm-up that is not over when the run breaks off."""
    document = tiny_document(**sections)
    if "path" not in document["model"]:
        document["model"]["config"] |= {"attention_dropout": 0.2, "num_hidden_layers": 1}
    schedule = {"kind": "cosine", "warmup_steps": min(4, steps)}
    document["training"] = {"steps": steps, "global_batch": 12, "clip_grad_norm": 1.0, "schedule": schedule}
    return validate_spec(document | {"checkpoint": checkpoint or {}})


def _same(found: Run, expected: Run) -> None:
    assert found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(value, expected.weights[name]) for name, value in found.weights.items())
    seen = {report.step: (report.loss, report.lr) for report in found.reports}
    assert seen.items() <= {report.step: (report.loss, report.lr) for report in expected.reports}.items()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run without a break, and the checkpoints that it left after steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("unbroken")
    run = run_alone(_spec({"directory": str(folder / "saved"), "every_steps": 2, "keep": 9}), folder)
    assert run.outcome is Outcome.COMPLETED
    return run, folder / "saved"


def test_a_run_says_what_it_saved(unbroken: tuple[Run, Path]) -> None:
    run, saved = unbroken
    told = run.told("checkpoint_saved")
    assert [entry.data["step"] for entry in told] == [2, 4, 6]
    newest = newest_complete(saved)
    assert newest is not None and str(newest.path) == told[-1].data["path"]
    assert newest.num_bytes == told[-1].data["bytes"] and float(told[-1].data["seconds"] or 0) > 0
    manifest = read_manifest(newest.path)
    assert manifest.data.samples == 6 * 12 and manifest.run.mesh["shard"] == 1
    assert manifest.run.routes["model.layers.0.self_attn.q_proj.weight"] == "muon"
    counted = {(entry.kernel, entry.algorithm, entry.launches, entry.matrices) for entry in run.reports[-1].ns}
    assert counted and counted == {
        (entry.kernel, entry.algorithm, entry.launches, entry.matrices) for entry in manifest.kernels.launched
    }


def test_a_checkpoint_names_the_kernel_that_was_swapped_in_and_its_epoch(tmp_path: Path) -> None:
    target = KernelTarget(kernel=Kernel.BLOCKED, algorithm=Algorithm.DIRECT, coefficients=CoefficientSet.YOU)
    saved = tmp_path / "saved"
    spec = _spec({"directory": str(saved), "every_steps": 1}, steps=1, kernels={"kernel": "cublas"})
    run_alone(spec, tmp_path, policy=KernelPolicy(epoch=7, target=target))
    newest = newest_complete(saved)
    assert newest is not None
    kernels = read_manifest(newest.path).kernels
    assert (kernels.configured, kernels.algorithm, kernels.coefficients) == ("blocked", "direct", "you")
    assert kernels.epoch == 7 and {(each.kernel, each.algorithm) for each in kernels.launched} == {
        ("blocked", "direct")
    }


def test_resumed_in_the_middle_of_the_warm_up(unbroken: tuple[Run, Path], tmp_path: Path) -> None:
    """From a copy elsewhere: loss, rates, dropout and weights are those of the run that was not broken off."""
    run, saved = unbroken
    shutil.copytree(saved / "step-00000002", tmp_path / "copy")
    resumed = run_alone(_spec({"resume": str(tmp_path / "copy")}), tmp_path)
    _same(resumed, run)
    assert [report.step for report in resumed.reports] == [3, 4, 5, 6]
    assert [report.steps_done for report in resumed.reports] == [1, 2, 3, 4]
    assert resumed.reports[-1].tokens_total == 4 * 12 * 32, "totals count what this attempt did"
    assert [entry.data["ok"] for entry in resumed.told("routes_verified")] == [True]
    (told,) = resumed.told("resumed")
    assert (told.data["step"], told.data["path"]) == (2, str(tmp_path / "copy"))
    assert not resumed.told("checkpoint_saved"), "nobody asked for checkpoints"


def test_stopped_and_started_again(unbroken: tuple[Run, Path], tmp_path: Path) -> None:
    """A stop saves first; the next attempt goes on by itself, and a third finds nothing left to do."""
    spec, directory = _spec(), tmp_path / "job"
    first = run_alone(spec, tmp_path, stop_at=2, directory=directory)
    assert first.outcome is Outcome.STOPPED
    assert [entry.data["step"] for entry in first.told("checkpoint_saved")] == [3]
    assert [entry.name for entry in first.milestones][-2:] == ["checkpoint_saved", "stopping"]
    second = run_alone(spec, tmp_path, attempt=2, directory=directory)
    assert second.outcome is Outcome.COMPLETED and second.reports[0].step == 4
    _same(second, unbroken[0])
    third = run_alone(spec, tmp_path, attempt=3, directory=directory)
    assert third.outcome is Outcome.COMPLETED and third.reports == []
    _same(third, unbroken[0])


def test_a_later_attempt_prefers_what_the_job_has_saved_itself(unbroken: tuple[Run, Path], tmp_path: Path) -> None:
    spec = _spec({"resume": str(unbroken[1] / "step-00000002")})
    run_alone(spec, tmp_path, stop_at=4, directory=tmp_path / "job")
    later = run_alone(spec, tmp_path, attempt=2, directory=tmp_path / "job")
    assert later.told("resumed")[0].data["step"] == 5
    _same(later, unbroken[0])


def test_a_stop_of_a_resumed_run_that_has_done_nothing_saves_nothing(
    unbroken: tuple[Run, Path], tmp_path: Path
) -> None:
    spec = _spec({"resume": str(unbroken[1] / "step-00000004")}, steps=9)
    stopped = run_alone(spec, tmp_path, stop_at=0, directory=tmp_path / "job")
    assert stopped.outcome is Outcome.STOPPED and stopped.reports == []
    assert [entry.name for entry in stopped.milestones if "checkpoint" in entry.name] == []


def test_never(unbroken: tuple[Run, Path], tmp_path: Path) -> None:
    shutil.copytree(unbroken[1], tmp_path / "saved")
    anew = run_alone(_spec({"resume": "never", "directory": str(tmp_path / "saved")}, steps=1), tmp_path)
    assert anew.reports[0].step == 1 and not anew.told("resumed")


def test_weights_alone(unbroken: tuple[Run, Path], tmp_path: Path) -> None:
    """A plain ``torch.save`` of a state dict, as a single process writes it, or as DDP does."""
    plain = {name: value * 2 for name, value in unbroken[0].weights.items()}
    losses = set()
    for index, content in enumerate([plain, {"model": {f"module.{name}": value for name, value in plain.items()}}]):
        torch.save(content, tmp_path / f"{index}.pt")
        run = run_alone(_spec({"resume": str(tmp_path / f"{index}.pt")}, steps=1), tmp_path)
        assert run.told("resumed")[0].data["step"] == 0
        losses.add(run.reports[0].loss)
    assert len(losses) == 1 and losses != {unbroken[0].reports[0].loss}
    broken = dict(plain, extra=torch.zeros(1))
    del broken["lm_head.weight"]
    broken["model.norm.weight"] = torch.zeros(31)
    torch.save(broken, tmp_path / "broken.pt")
    with pytest.raises(CheckpointError) as caught:
        run_alone(_spec({"resume": str(tmp_path / "broken.pt")}, steps=1), tmp_path)
    for line in ("missing lm_head.weight", "unexpected extra", "model.norm.weight has shape (31,), the job's (32,)"):
        assert line in str(caught.value)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_alone(_spec({"resume": str(tmp_path / "cut.pt")}, steps=1), tmp_path)


def test_exported_to_transformers_and_taken_in_again(
    unbroken: tuple[Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    run, saved = unbroken
    assert main(["export", str(saved / "step-00000006"), str(tmp_path / "model")]) == 0
    for number, name in enumerate(("", "latest")):
        assert main(["export", str(saved / name), str(tmp_path / f"newest-{number}")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(value, run.weights[name]) for name, value in model.state_dict().items())
    taken = run_alone(_spec(steps=1, model={"path": str(tmp_path / "model")}), tmp_path)
    assert taken.reports[0].loss < run.reports[0].loss
    assert main(["export", str(saved / "step-00000006"), str(tmp_path / "model")]) == 2
    assert main(["export", str(tmp_path), str(tmp_path / "other")]) == 2
    assert "holds no complete one" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run_alone(_spec({"directory": str(tmp_path / "file" / "below")}), tmp_path)


@pytest.mark.multiproc
def test_two_ranks_continue_what_one_has_saved(unbroken: tuple[Run, Path], tmp_path: Path) -> None:
    """Without a server; dropout differs by rank, so the run that is compared has none."""
    whole = run_alone(tiny_spec(checkpoint={"directory": str(tmp_path), "every_steps": 2, "keep": 9}), tmp_path)
    told: list[Body] = []
    place = {"directory": str(tmp_path / "two"), "resume": str(tmp_path / "step-00000002")}
    end = run_local(tiny_spec(2, checkpoint=place), told.append, save=tmp_path / "two.pt")
    assert end.reason == Reason.COMPLETED, end
    reports = [body for body in told if isinstance(body, RankReport)]
    assert {(report.rank, report.first_step) for report in reports} == {(0, 2), (1, 2)}
    losses = {report.step: report.loss for report in reports if report.rank == 0}
    assert losses == pytest.approx({report.step: report.loss for report in whole.reports[2:]}, rel=1e-3)
    assert [body.data["ok"] for body in told if body.kind == "milestone" and body.name == "routes_verified"] == [True]
    newest = newest_complete(tmp_path / "two")
    assert newest is not None and newest.step == 5 and len(read_manifest(newest.path).files) == 2
