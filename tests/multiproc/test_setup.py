"""What is refused at setup is refused on every rank, named, and before anything has changed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon_runtime as dmuon
from dmuon_runtime import ledger
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, dedicate, hold_to_reference, world_mesh
from tests.multiproc.models import POLICY, ToyLM, batch, lm_loss, make
from tests.multiproc.reference import PolarNewtonSchulz

pytestmark = pytest.mark.multiproc


def _trains(name: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _refusals() -> None:
    rank, mesh = dist.get_rank(), world_mesh()
    model = ToyLM()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if rank == 1:
        model.layers[1].up = nn.Linear(12, 24)
    with pytest.raises(dmuon.PlanMismatch, match=r"layers\.1\.up\.weight") as found:
        dmuon.dedicate_params(model, mesh, _trains, param_policy=POLICY)
    assert "ranks [0] have" in str(found.value) and "ranks [1] have" in str(found.value)
    with pytest.raises(dmuon.RouteRefused if rank == 0 else dmuon.PlanMismatch, match=r"layers\.0\.norm\.weight"):
        dmuon.dedicate_params(ToyLM(), mesh, _trains, param_policy=None if rank == 0 else POLICY)
    with pytest.raises(dmuon.NothingMatched):
        dmuon.dedicate_params(ToyLM(), mesh, lambda name, parameter: False)
    partly = ToyLM()
    dmuon.dedicate_params(partly, mesh, lambda name, _: "embed" not in name, param_policy=POLICY)
    with pytest.raises(dmuon.UnmanagedParameters, match=r"embed\.weight: the predicate leaves them out.*fully_shard"):
        dmuon.Muon(partly)
    two_axes = init_device_mesh("cpu", (1, dist.get_world_size()))
    with pytest.raises(dmuon.MeshError, match="1 axis"):
        dmuon.dedicate_params(ToyLM(), two_axes, _trains, param_policy=POLICY)
    with pytest.raises(dmuon.NotDedicated):
        dmuon.Muon(model)
    with pytest.raises(ZeroDivisionError if rank == 1 else dmuon.PlanMismatch, match="by zero"):
        dmuon.dedicate_params(ToyLM(), mesh, lambda name, _: bool(1 // (1 - rank)), param_policy=POLICY)
    for wrong, message in (({"mesh": 2}, "not int"), ({"model": "toy"}, "not str"), ({"predicate": True}, "not True")):
        with pytest.raises(dmuon.DMuonError, match=message):
            dmuon.dedicate_params(**{"model": ToyLM(), "mesh": mesh, "predicate": _trains, **wrong})  # type: ignore[arg-type]
    if rank == 0:
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def _second_time() -> None:
    run = dedicate(make(), Setting())
    with pytest.raises(dmuon.AlreadyDedicated):
        dmuon.dedicate_params(run.model, world_mesh(), _trains, param_policy=POLICY)
    with pytest.raises(dmuon.AlreadyDedicated, match=r"up\.weight"):  # a part of it is no new model
        dmuon.dedicate_params(run.model.get_submodule("layers.0"), world_mesh(), _trains, param_policy=POLICY)
    run.model.register_parameter("late", nn.Parameter(torch.ones(3)))
    with pytest.raises(dmuon.UnmanagedParameters, match="late"):
        dmuon.Muon(run.model)
    del run.model.late
    with pytest.raises(dmuon.AlreadyOptimized, match="del optimizer"):
        dmuon.Muon(run.model)
    for whole_or_part in (run.model, run.model.get_submodule("layers.0")):
        with pytest.raises(dmuon.UnsupportedFeature, match="copy before dedicate_params, or build another model"):
            copy.deepcopy(whole_or_part)
    with pytest.raises(dmuon.UnsupportedFeature, match="get_optimizer_state_dict"):
        copy.deepcopy(run.optimizer)
    plan = dmuon.plan_params(make(), dist.get_world_size(), _trains, param_policy=POLICY)
    assert plan.hash == dmuon.get_plan(run.model).hash
    if dist.get_rank() == 0:
        with pytest.raises(dmuon.CallMismatch, match=r"step and clip|clip and step"):
            run.optimizer.step()
    else:
        with pytest.raises(dmuon.CallMismatch, match=r"step and clip|clip and step"):
            dmuon.clip_grad_norm_(run.optimizer, 1.0)


def _changed_later() -> None:
    """What trains when a step begins, and did not when the optimizer was built, has nobody: each way to get there."""

    def unfrozen(model: nn.Module) -> None:
        model.get_parameter("norm.bias").requires_grad_(True)

    def replaced(model: nn.Module) -> None:
        model.get_submodule("norm").bias = nn.Parameter(torch.zeros(12))

    def whole_module(model: nn.Module) -> None:
        model.norm = nn.LayerNorm(12, elementwise_affine=True)

    def compiled(model: nn.Module) -> None:
        model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.layers)  # type: ignore[union-attr]

    for change in (unfrozen, replaced, whole_module, compiled):
        model = make()
        model.norm.bias.requires_grad_(change is not unfrozen)
        run = dedicate(model, Setting())
        run.optimizer.step()
        change(model)
        if change is compiled:
            run.optimizer.step()  # other modules around the same parameters
        else:
            with pytest.raises(dmuon.UnmanagedParameters, match=r"norm\.bias: unfrozen, replaced or added after"):
                run.optimizer.step()
    with pytest.raises(dmuon.ParamGroupError, match="param_groups"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(dmuon.UnsupportedFeature, match="get_model_state_dict"):
        run.model.state_dict()
    with pytest.raises(dmuon.UnsupportedFeature, match="set_model_state_dict"):
        run.model.load_state_dict({})


def test_refusals_reach_every_rank() -> None:
    """Different models, a policy refused on one rank, an empty match, a forgotten parameter, a mesh of two axes."""
    run_ranks(2, _refusals)
    run_ranks(2, _second_time)
    run_ranks(1, _changed_later)


def _states() -> None:
    setting = Setting(steps=2)

    def loop(run: Run, setting: Setting) -> None:
        """Spoil the weights and load them back between two steps."""
        for step in range(setting.steps):
            lm_loss(run.model, batch(step, dist.get_rank())).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            kept = dmuon.get_model_state_dict(run.model)
            with torch.no_grad():
                lm_loss(run.model, batch(9, 9))
            dmuon.set_model_state_dict(run.model, {name: value * 3 for name, value in kept.items()})
            with torch.no_grad():
                spoiled = lm_loss(run.model, batch(9, 9))
            dmuon.set_model_state_dict(run.model, kept)
            with torch.no_grad():
                assert not torch.equal(spoiled, lm_loss(run.model, batch(9, 9)))
            wrong = {name: value for name, value in kept.items() if name != "norm.bias"}
            wrong["norm.weight"] = torch.zeros(5)
            with pytest.raises(dmuon.StateMismatch, match=r"missing norm\.bias.*norm\.weight has shape"):
                dmuon.set_model_state_dict(run.model, wrong if dist.get_rank() == 0 else kept)

    def backward(model: nn.Module, step: int, rank: int) -> None:
        lm_loss(model, batch(step, rank)).backward()

    for reshard in (True, False):
        hold_to_reference(backward, Setting(steps=2, reshard=reshard), loop=loop)
    run = hold_to_reference(backward, setting)
    state = dmuon.get_model_state_dict(run.model)
    assert list(state) == list(make().state_dict())
    assert state["seen"].item() == setting.steps


def test_model_state_round_trip() -> None:
    """Whole tensors by name with buffers; loading takes effect in Z3 and Z2; a wrong state changes nothing."""
    run_ranks(3, _states)


SPLIT: dict[str, object] = {
    **POLICY,
    "overrides": [*POLICY["overrides"], {"name": "up.weight", "set": {"split_rows": [8, 12]}}],  # type: ignore[misc]
}
HALF: dict[str, object] = {
    "defaults": {"param_dtype": "bf16", "grad_dtype": "fp32"},
    "overrides": [*POLICY["overrides"], {"name": "lm_head", "set": {"output_dtype": "fp32"}}],  # type: ignore[misc]
}


def _policies() -> None:
    def backward(model: nn.Module, step: int, rank: int) -> None:
        lm_loss(model, batch(step, rank)).backward()

    run = hold_to_reference(backward, Setting(policy=SPLIT))
    assert [p.split_rows for p in dmuon.get_plan(run.model).parameters if "up.weight" in p.name] == [(8, 12)] * 3
    model = make(dtype=torch.float32)
    run = dedicate(model, Setting(policy=HALF))
    losses = []
    for _ in range(8):
        loss = lm_loss(model, batch(0, dist.get_rank()))
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert loss.dtype is torch.float32
    assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    assert all(
        value.dtype is torch.float32 for name, value in dmuon.get_model_state_dict(model).items() if name != "seen"
    )


def _default_newton_schulz() -> None:
    """The planned matrices are the ones that Newton-Schulz says it got, and an update has the RMS that it should."""
    model = make(dtype=torch.float32)
    dmuon.dedicate_params(model, world_mesh(), _trains, param_policy={"overrides": POLICY["overrides"]})
    optimizer = dmuon.Muon(model, lr=0.1)
    before = sum(count.matrices for count in ledger.snapshot().values())
    for step in range(2):
        lm_loss(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = sum(count.matrices for count in ledger.snapshot().values())
    assert after - before == dmuon.get_counters(model).snapshot().ns_planned_matrices
    assert optimizer.last_step is not None
    square_sum, elements = optimizer.last_step.updates["muon"]
    assert 0.1 * 0.05 < (square_sum / elements) ** 0.5 < 0.1 * 0.25, "0.2 lr, less where the gradient lacks rank"
    optimizer.set_newton_schulz(dmuon.NewtonSchulz(backend="direct", kernel="cublas"))
    lm_loss(model, batch(3, dist.get_rank())).backward()
    optimizer.step()
    assert ledger.snapshot()["cublas", "direct"].matrices > 0, "what was set is what runs"


def _groups() -> None:
    model = dedicate(make(), Setting()).model
    named = dict(model.named_parameters())
    with pytest.raises(dmuon.ParamGroupError, match=r"norm\.weight is in group 0 and again in group 1.*no group has"):
        dmuon.Muon(model, param_groups=[{"params": [named["norm.weight"]]}, {"params": [named["norm.weight"]]}])
    split = [{"params": [p], "lr": 0.5, "name": name} for name, p in named.items() if name == "norm.weight"]
    split.append({"params": [p for name, p in named.items() if name != "norm.weight"], "muon_lr": 0.2, "adamw_lr": 0.1})
    optimizer = dmuon.Muon(model, param_groups=split, ns_backend=PolarNewtonSchulz())
    rates = {str(group["group_name"]): group["lr"] for group in optimizer.param_groups}
    assert rates == {
        "norm.weight/adamw": 0.5, "group_1/muon": 0.2, "group_1/adamw": 0.1, "group_1/sharded_adamw": 0.1
    }  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.1, 0.05, 0.05]
    rows = dmuon.summarize_param_groups(model, optimizer)
    assert rows["route_param_counts"] == {"sharded_adamw": 2, "muon": 6, "adamw": 14}
    assert "overrides[0]" in str(rows) and "muon" in str(dmuon.summarize_comm_plan(model))
    circle: list[object] = [optimizer, schedule]
    circle.append(circle)  # nobody's, when these names are gone, but for the collector to find
    del optimizer, schedule, circle
    with pytest.raises(dmuon.SettingError, match="lr"):
        dmuon.Muon(model, lr=-1.0)
    assert dmuon.Muon(model).param_groups, "one that nobody holds, or that was never built, is in nobody's way"


def test_policies_and_groups() -> None:
    """Row blocks are matrices of their own; half-precision compute keeps single-precision masters; groups by route."""
    run_ranks(2, _policies)
    run_ranks(2, _groups)
    run_ranks(2, _default_newton_schulz)


def test_mesh_of_some_ranks() -> None:
    """Two meshes of one job train two models side by side."""
    run_ranks(4, _two_halves)


def _two_halves() -> None:
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", torch.tensor([0, 2])), DeviceMesh("cpu", torch.tensor([1, 3]))]
    model = make(seed=rank % 2)
    dmuon.dedicate_params(model, meshes[rank % 2], _trains, param_policy=POLICY)
    optimizer = dmuon.Muon(model, ns_backend=PolarNewtonSchulz())
    for step in range(2 + rank % 2):
        lm_loss(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = dmuon.get_model_state_dict(model)
    sums: list[float | None] = [None] * 4
    dist.all_gather_object(sums, float(sum(value.double().sum() for value in state.values())))
    assert sums[0] == sums[2] != sums[1] == sums[3]
