"""Plans, and refusals with all their reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.specs import tiny_document, tiny_spec
from worker.contract.errors import PlanRefused
from worker.contract.planning import PlanAnswer, PlanRequest
from worker.device import gpu_model
from worker.planner import answer, make_plan
from worker.settings import WorkerSettings

NORMS: dict[str, Any] = {"overrides": [{"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}}]}


def refusals(**sections: Any) -> dict[str, str]:
    """Pointer and message of each error, by pointer (the last where several share one)."""
    with pytest.raises(PlanRefused) as caught:
        make_plan(tiny_spec(2, **sections))
    return {entry.pointer: f"{entry.code}: {entry}" for entry in caught.value.errors}


def test_a_plan_says_it_all(tmp_path: Path) -> None:
    spec = tiny_spec(2, training={"steps": 1, "global_batch": 12, "micro_batch": 3})
    plan = make_plan(spec, WorkerSettings(cache_directory=tmp_path))
    assert {route.route: route.parameters for route in plan.routes} == {"muon": 14, "adamw": 5, "sharded_adamw": 2}
    assert plan.ns_matrices == sum(rank.matrices for rank in plan.ranks) == 14
    assert plan.tokens_per_step == 12 * 32
    forward, reduce = (
        next(entry for entry in plan.traffic if (entry.route, entry.phase) == ("sharded_adamw", phase))
        for phase in ("forward", "reduce")
    )
    assert (forward.collectives, reduce.collectives) == (2 * 2, 2), "two micro batches gather twice and reduce once"
    assert forward.total_payload_bytes == 2 * forward.payload_bytes, "both ranks gather alike"
    rules = {entry.name: entry.rule for entry in plan.parameters}
    assert rules["lm_head.weight"] == "overrides[1]" and rules["model.layers.0.mlp.up_proj.weight"] == "defaults"
    assert plan.plan_hash == make_plan(spec, WorkerSettings(cache_directory=tmp_path)).plan_hash
    assert plan.plan_hash != make_plan(tiny_spec(3), WorkerSettings(cache_directory=tmp_path)).plan_hash


def test_newton_schulz_flops_are_those_of_the_spec(tmp_path: Path) -> None:
    settings = WorkerSettings(cache_directory=tmp_path)
    usual = make_plan(tiny_spec(2), settings)
    sides = [sorted(entry.shape) for entry in usual.parameters if entry.route == "muon"]

    def gram(steps: int, restarts: int) -> float:
        return sum(4 * steps * n**3 + 3 * (m * n**2 - n**3) * (1 + restarts) for n, m in sides)

    assert usual.ns_flops == gram(5, 1) and len(sides) == 14
    three: dict[str, Any] = {"optimizer": {"kind": "dmuon", "muon": {"ns_steps": 3}}}
    direct = sum(3 * (3 * m * n**2 + n**3) for n, m in sides)
    for sections, flops in (
        (three, gram(3, 0)),  # too few to start anew
        (three | {"kernels": {"algorithm": "direct"}}, direct),
        ({"kernels": {"restarts": [1, 3]}}, gram(5, 2)),
    ):
        plan = make_plan(tiny_spec(2, **sections), settings)
        assert plan.ns_flops == flops
        assert plan.plan_hash == usual.plan_hash, "owners stay where they are, whatever a job swaps to"


def test_a_plan_says_what_a_step_will_cost_on_a_chip(tmp_path: Path) -> None:
    settings, spec = WorkerSettings(cache_directory=tmp_path), tiny_spec(2)
    assert make_plan(spec, settings).cost is None, "a job on CPUs has no chip"
    plan = make_plan(spec, settings, chip="NVIDIA H200")
    cost = plan.cost
    assert cost is not None and cost.chip == "nvidia-h200" and "network_bytes_per_s" in cost.assumed
    assert plan.plan_hash == make_plan(spec, settings).plan_hash, "a prediction is no part of what ranks agree on"
    assert cost.overhead_ratio == pytest.approx(cost.step_s / cost.adamw_step_s - 1)
    assert cost.step_s == pytest.approx(cost.compute_s + cost.exposed_s + cost.update_s)
    elsewhere = make_plan(tiny_spec(2, data={"sequence_length": 64}), settings, chip="nvidia-h200").cost
    assert elsewhere is not None and elsewhere.compute_s > 2 * cost.compute_s, "attention grows with the square"
    with pytest.raises(PlanRefused) as caught:
        make_plan(spec, settings, chip="abacus")
    assert [(e.pointer, e.code) for e in caught.value.errors] == [("/chip", "unknown_chip")]
    assert "nvidia-h200" in str(caught.value)


def test_the_gpu_of_a_machine_is_read_from_its_driver(tmp_path: Path) -> None:
    assert gpu_model(tmp_path) is None
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\n")
    assert gpu_model(tmp_path) == "NVIDIA H200"


def test_a_baseline_is_planned_without_owners(tmp_path: Path) -> None:
    settings = WorkerSettings(cache_directory=tmp_path)
    plan = make_plan(tiny_spec(2, optimizer={"kind": "muon"}), settings)
    assert plan.optimizer == "muon"
    assert {route.route: route.parameters for route in plan.routes} == {"muon": 14, "adamw": 7}
    rules = {entry.name: entry.rule for entry in plan.parameters}
    assert rules["lm_head.weight"] == "output head" and rules["model.embed_tokens.weight"] == "embedding"
    assert (plan.ranks, plan.traffic, plan.ns_matrices, plan.predicted_imbalance) == ((), (), None, None)
    assert {entry.owner for entry in plan.parameters} == {None}
    assert plan.warnings == ("/routing/overrides say nothing to the optimizer kind 'muon'",)
    other = {"kind": "muon", "adamw_name_hints": ["down_proj"]}
    hinted = make_plan(tiny_spec(2, optimizer=other, routing={"exclude": ["norm"]}), settings)
    assert {route.route: route.parameters for route in hinted.routes} == {"muon": 12, "adamw": 4}
    assert hinted.plan_hash != plan.plan_hash and hinted.warnings == ()
    kernels = {"kernels": {"coefficients": "you"}, "routing": {"hook_boundaries": ["LlamaMLP"]}}
    adamw = make_plan(tiny_spec(optimizer={"kind": "adamw"}, **kernels), settings)
    assert [route.route for route in adamw.routes] == ["adamw"] and "/kernels" in adamw.warnings[0]
    wrong = refusals(optimizer={"kind": "adamw"}, routing={"hook_boundaries": ["NoSuchLayer"]}, mesh={"tensor": 2})
    assert set(wrong) == {"/routing/hook_boundaries/0", "/mesh/tensor"}


def test_replicas_are_planned_from_shapes_alone(tmp_path: Path) -> None:
    """On a grid of 2 by 2 owners are spread over all four ranks, and only an owner's column hears what it publishes."""
    settings = WorkerSettings(cache_directory=tmp_path)
    plan = make_plan(tiny_spec(mesh={"replicate": 2, "shard": 2}), settings)
    assert {entry.owner for entry in plan.parameters if entry.route == "muon"} == {0, 1, 2, 3}
    publish = next(entry for entry in plan.traffic if (entry.route, entry.phase) == ("muon", "publish"))
    assert 2 * publish.payload_bytes <= publish.total_payload_bytes <= 4 * publish.payload_bytes
    assert {entry.phase for entry in plan.traffic} == {"forward", "backward", "reduce", "publish"}
    assert plan.plan_hash != make_plan(tiny_spec(4), settings).plan_hash


def test_a_norm_left_on_muon_is_refused_by_name_with_the_cure() -> None:
    with pytest.raises(PlanRefused) as caught:
        make_plan(tiny_spec(routing=NORMS))
    errors = caught.value.errors
    assert len(errors) == 5, "each norm is an offender of its own"
    assert {entry.pointer for entry in errors} == {"/routing"}
    assert any("model.norm.weight" in entry.message and '"route": "adamw"' in entry.message for entry in errors)


def test_all_sections_are_judged_at_once() -> None:
    found = refusals(
        data={"files": ["/nonexistent/*.txt"], "sequence_length": 32},
        mesh={"tensor": 2},
        routing=NORMS,
        kernels={"kernel": "cute_sm80"},
    )
    assert set(found) == {"/data/files/0", "/mesh/tensor", "/routing", "/kernels/kernel"}
    assert "SM80+" in found["/kernels/kernel"]


def test_kernels_are_checked() -> None:
    elsewhere = make_plan(tiny_spec(2, kernels={"kernel": "quack"}, resources={"gpus_per_worker": 1}))
    assert elsewhere.world_size == 2, "a machine without a GPU does not judge the workers' GPUs"
    assert "SM90+" in refusals(kernels={"kernel": "quack"})["/kernels/kernel"]
    assert "beyond the last of 5 steps" in refusals(kernels={"restarts": [5]})["/kernels/restarts"]
    found = refusals(kernels={"coefficients": [[3.0, 3.0, 3.0]]})
    assert "grows beyond" in found["/kernels/coefficients"]


def test_hook_boundaries_must_exist() -> None:
    routing = tiny_document()["routing"] | {"hook_boundaries": ["LlamaDecoderLayer", "NoSuchLayer"]}
    found = refusals(routing=routing)
    assert set(found) == {"/routing/hook_boundaries/1"}
    routing["hook_boundaries"] = ["LlamaMLP"]
    units = {entry.unit for entry in make_plan(tiny_spec(routing=routing)).parameters}
    assert {"model.layers.0.mlp", "model.embed_tokens", "lm_head"} <= units


def test_the_answer_is_a_value_whatever_happens() -> None:
    def ask(request: PlanRequest) -> PlanAnswer:
        return PlanAnswer.model_validate_json(answer(request.model_dump_json()))

    assert ask(PlanRequest(spec_json=tiny_spec().model_dump_json())).plan is not None
    assert [e.code for e in ask(PlanRequest(spec_json=tiny_spec(routing=NORMS).model_dump_json())).errors] == [
        "route_refused"
    ] * 5
    unknown = json.dumps(tiny_document() | {"modle": {}})
    assert [e.pointer for e in ask(PlanRequest(spec_json=unknown)).errors] == ["/modle"]
    kernels = ask(PlanRequest()).kernels
    assert kernels is not None and {entry.kernel.value for entry in kernels if entry.available} >= {"auto", "cublas"}
    assert PlanAnswer.model_validate_json(answer("{")).failure is not None


def test_serving_answers_a_line_for_a_line() -> None:
    requests = [PlanRequest().model_dump_json(), PlanRequest(spec_json="{}").model_dump_json(), "nonsense"]
    done = subprocess.run(
        [sys.executable, "-m", "worker", "plan", "--serve"],
        input="\n".join(requests) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answers = [PlanAnswer.model_validate_json(line) for line in done.stdout.splitlines()]
    assert [bool(entry.kernels) for entry in answers] == [True, False, False]
    assert answers[1].errors and answers[2].failure is not None


def test_a_tokenizer_directory_that_no_system_takes() -> None:
    spec = tiny_spec(data={"sequence_length": 16, "tokenizer": "/" + "x" * 300})
    with pytest.raises(PlanRefused) as caught:
        make_plan(spec)
    assert [error.pointer for error in caught.value.errors] == ["/data/tokenizer"]
