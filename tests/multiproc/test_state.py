"""What one mesh saved any other continues: weights, buffers, tied names, momentum, moments and step counts, to the bit.

All ranks read the same batches, so that their mean gradient is the same number for 1, 2 and 4 of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dmuon_runtime as dmuon
from tests.multiproc.checkpointed import contents, make_exchange, newest, resume_from, save_to, whole_state
from tests.multiproc.harness import run_ranks
from tests.multiproc.models import POLICY, batch, make
from tests.multiproc.reference import PolarNewtonSchulz
from worker.checkpoints.exchange import Exchange
from worker.checkpoints.state import DmuonState
from worker.checkpoints.torch_state import TorchState

pytestmark = pytest.mark.multiproc

BEFORE, AFTER = 3, 5
FP32: dict[str, object] = {"overrides": POLICY["overrides"]}
POLICIES: dict[str, dict[str, object]] = {
    "fp32": FP32,
    "bf16": {"defaults": {"param_dtype": "bfloat16", "grad_dtype": "float32"}, **FP32},
}


@dataclass(frozen=True)
class Mesh:
    """One way to lay a model out over the first ``ranks`` ranks."""

    ranks: int
    replicas: int = 1
    reshard: bool = True
    storage: str = "sharded"
    hybrid: bool = False
    """Only the projections are the runtime's; the rest is FSDP2's, or DDP's with replicated storage."""


MESHES = {
    "one": Mesh(1),
    "two": Mesh(2),
    "three": Mesh(3, reshard=False),
    "four-z3": Mesh(4),
    "four-z2": Mesh(4, reshard=False),
    "hsdp": Mesh(4, replicas=2),
    "replicated": Mesh(4, storage="replicated"),
    "fsdp2": Mesh(4, hybrid=True),
    "ddp": Mesh(2, storage="replicated", hybrid=True),
}
SOURCES: dict[str, dict[str, tuple[str, ...]]] = {
    "fp32": {
        "one": ("two", "replicated"),
        "two": ("three", "hsdp"),
        "three": ("four-z3", "fsdp2"),
        "four-z3": ("one", "fsdp2"),
        "four-z2": ("ddp",),
        "hsdp": ("two", "replicated"),
        "replicated": ("one", "four-z2"),
        "fsdp2": ("one", "ddp"),
        "ddp": ("hsdp",),
    },
    "bf16": {
        "one": ("replicated",), "two": ("hsdp",), "four-z3": ("two",), "hsdp": ("one",), "replicated": ("four-z3",),
    },
}  # fmt: skip
"""By policy and mesh: whose checkpoints it continues. What is stored names no mesh, so pairs need not all be tried."""


def _matrices(name: str, parameter: nn.Parameter) -> bool:
    return name.endswith(("up.weight", "down.weight"))


def _build(mesh: Mesh, policy: dict[str, object], tied: str, seed: int) -> DmuonState:
    grid = init_device_mesh("cpu", (mesh.replicas, mesh.ranks // mesh.replicas), mesh_dim_names=("replicate", "shard"))
    model: nn.Module = make(tied=tied, seed=seed, dtype=torch.float32)
    dmuon.dedicate_params(
        model,
        grid["shard"],
        _matrices if mesh.hybrid else lambda name, parameter: parameter.requires_grad,
        param_policy=policy,
        replicate_mesh=grid["replicate"] if mesh.replicas > 1 else None,
        storage=mesh.storage,
        reshard_after_forward=mesh.reshard,
    )
    if mesh.hybrid and mesh.storage == "replicated":
        dmuon.ignore_in_ddp(model)
        model = DistributedDataParallel(model)
    elif mesh.hybrid:
        fully_shard(model, mesh=grid["shard"], ignored_params=dmuon.ignored_params(model))
    return DmuonState(model, dmuon.Muon(model, weight_decay=0.1, ns_backend=PolarNewtonSchulz()))


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step, 0)
    logits = model(tokens)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _train(state: DmuonState, begin: int, steps: int) -> None:
    for step in range(begin, begin + steps):
        state.optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        _loss(state.model, step).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def _exchange(topic: str) -> Exchange:
    return make_exchange(topic, dist.get_rank(), dist.get_world_size())


def _here() -> list[tuple[str, str]]:
    """Return policies and the meshes of this number of ranks that are tried under them."""
    return [(kind, name) for kind in SOURCES for name in SOURCES[kind] if MESHES[name].ranks == dist.get_world_size()]


def _save(folder: Path) -> None:
    """Each mesh trains, saves, and trains on without a break."""
    for kind, name in _here():
        state = _build(MESHES[name], POLICIES[kind], "head_first", 0)
        _train(state, 0, BEFORE)
        save_to(folder / kind / name, state, BEFORE, _exchange(f"save/{kind}/{name}"))
        saved = contents(newest(folder / kind / name))
        for key, value in whole_state(state).items():
            assert torch.equal(saved[key], value), f"{name} did not save {key} as it is"
        _train(state, BEFORE, AFTER)
        save_to(folder / kind / f"{name}-end", state, BEFORE + AFTER, _exchange(f"end/{kind}/{name}"))


def _load(folder: Path) -> None:
    """Each mesh continues what others have saved; its model has other weights and the tied names in another order."""
    for kind, target in _here():
        state = _build(MESHES[target], POLICIES[kind], "embed_first", 1)
        for source in SOURCES[kind][target]:
            change = "keep" if MESHES[target].hybrid != MESHES[source].hybrid else "refuse"
            resume_from(folder / kind / source, state, _exchange(f"{kind}/{target}/{source}"), policy=change)
            _same(state, newest(folder / kind / source), 0.0, f"{source} loaded on {target}")
            _train(state, BEFORE, AFTER)
            another_order = 3 in (MESHES[target].ranks, MESHES[source].ranks)
            tolerance = 1e-6 if another_order else 0.0
            _same(state, newest(folder / kind / f"{source}-end"), tolerance, f"{source} continued on {target}")


def _same(state: DmuonState, path: Path, tolerance: float, what: str) -> None:
    """Compare all that this rank holds, copies of other ranks' weights included, with what is stored."""
    stored = contents(path)
    state.optimizer.runtime.schedule.wait_published()
    for part in state.parts():
        if part.kind == "step" and not part.is_source:
            continue  # a rank without an element of an FSDP2 parameter does not count its steps
        expected = next(stored[part.kind, name] for name in part.names if (part.kind, name) in stored)
        expected = expected.reshape(-1)[part.start : part.stop].to(part.through or expected.dtype)
        found = part.values()
        assert found.dtype == expected.dtype or part.through is not None, f"{what}: dtype of {part.kind} {part.name}"
        if tolerance == 0.0:
            assert torch.equal(found, expected.to(found.dtype)), f"{what}: {part.kind} of {part.name} differs"
        else:
            error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
            bound = tolerance if part.kind == "weight" else 10 * tolerance
            assert error <= bound, f"{what}: {part.kind} of {part.name} differs by {float(error):.2e}"


def _run(folder: Path, saves: bool, loads: bool) -> None:
    if saves:
        _save(folder)
    if loads:
        _load(folder)
    if dist.get_world_size() == 2:
        _refuse_whole()
    if dist.get_world_size() < 3:
        _torch_optimizers(folder)


def _torch_state(topic: str) -> TorchState:
    """torch's Muon and AdamW: under FSDP2 on two ranks, plain on one; no weight has an even number of rows a rank."""
    model: nn.Module = make(tied="embed_first", dtype=torch.float32)
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    matrices = [p for name, p in model.named_parameters() if _matrices(name, p)]
    others = [p for name, p in model.named_parameters() if not _matrices(name, p)]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    for parameter in matrices:
        optimizers[0].state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    for parameter in others:
        zeros = torch.zeros_like(parameter)
        slots = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        optimizers[1].state[parameter].update(slots)
    return TorchState(model, optimizers, _exchange(topic))


def _torch_optimizers(folder: Path) -> None:
    """What two ranks hold of torch's optimizers under FSDP2 one rank takes over, and its next step works."""
    state = _torch_state(f"torch/{dist.get_world_size()}")
    if dist.get_world_size() == 2:
        _loss(state.model, 0).backward()
        state.optimizers[1].step()
        for part in state.parts():
            if part.kind == "momentum_average":
                part.load(torch.arange(part.start, part.stop, dtype=torch.float32))
        save_to(folder / "torch", state, 1, _exchange("torch/save"))
        return
    resume_from(folder / "torch", state, _exchange("torch/load"))
    stored = contents(newest(folder / "torch"))
    assert {key[0] for key in stored} == {"weight", "momentum_average", "step", "exp_avg", "exp_avg_sq"}
    for part in state.parts():
        assert torch.equal(part.values(), stored[part.kind, part.name].reshape(-1)), (part.kind, part.name)
        if part.kind == "momentum_average":
            assert torch.equal(part.values(), torch.arange(part.stop, dtype=torch.float32))
        if part.kind == "step":
            assert float(part.tensor) == 1.0
    assert set(state.routes().values()) == {"muon", "adamw"}
    for optimizer in state.optimizers:
        _loss(state.model, 1).backward()
        optimizer.step()


def _refuse_whole() -> None:
    """What is wrong on one rank is refused on all, all of it, and nothing changes."""
    state = _build(MESHES["two"], FP32, "head_first", 0)
    _train(state, 0, 1)
    before = whole_state(state)
    wrong = dmuon.get_optimizer_state_dict(state.model, state.optimizer)
    slots = wrong["state"]
    assert dmuon.get_plan(state.model).parameters[0].aliases and "lm_head.weight" in slots
    if dist.get_rank() == 0:
        del slots["norm.bias"]["exp_avg"]
        slots["elsewhere"] = {"momentum_buffer": torch.zeros(2)}
        slots["layers.0.up.weight"]["momentum_buffer"] = torch.zeros(3, 4)
        slots["layers.1.up.weight"]["momentum_buffer"] = slots["layers.1.up.weight"]["momentum_buffer"].bfloat16()
        wrong["param_groups"][0]["group_name"] = "another"
    with pytest.raises(dmuon.StateMismatch) as caught:
        dmuon.set_optimizer_state_dict(state.model, state.optimizer, wrong)
    said = str(caught.value)
    for part in (
        "missing exp_avg of norm.bias", "unexpected momentum_buffer of elsewhere", "(3, 4)", "torch.bfloat16",
        "unexpected group another",
    ):  # fmt: skip
        assert part in said, f"{part!r} is not in {said}"
    assert all(torch.equal(value, before[key]) for key, value in whole_state(state).items())
    with pytest.raises(dmuon.StateMismatch, match="rank 1: OSError: gone"):
        dmuon.load_state_parts(state.model, state.optimizer, _read_on_rank_zero)
    assert all(torch.equal(value, before[key]) for key, value in whole_state(state).items())
    right = dmuon.get_optimizer_state_dict(state.model, state.optimizer)
    _train(state, 1, 2)
    dmuon.set_optimizer_state_dict(state.model, state.optimizer, right)
    assert all(torch.equal(value, before[key]) for key, value in whole_state(state).items() if key[0] != "weight")


def _read_on_rank_zero(part: dmuon.StatePart) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise OSError("gone")
    return torch.full((part.stop - part.start,), 7.0)


@pytest.mark.timeout(400)
def test_any_mesh_continues_any_other(tmp_path: Path) -> None:
    """Meshes of 1, 2, 3 and 4 ranks, Z2, Z3, HSDP, replicated, and beside FSDP2; fp32, and bf16 with fp32 masters."""
    run_ranks(4, _run, tmp_path, True, False, deadline_s=100.0)
    for ranks in (3, 2, 1):
        run_ranks(ranks, _run, tmp_path, True, True)
    run_ranks(4, _run, tmp_path, False, True, deadline_s=100.0)
