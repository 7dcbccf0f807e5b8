"""Train a model on this rank under the runtime and hold it to the reference: weights, traffic, order of collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon_runtime as dmuon
from dmuon_runtime.process_groups import Axis
from dmuon_runtime.runtime import find_runtime
from dmuon_runtime.transport import Handle, Transport
from tests.multiproc.models import POLICY, batch, lm_loss, make
from tests.multiproc.reference import Backward, PolarNewtonSchulz, ReferenceTrainer

__all__ = [
    "Run", "Setting", "assert_planned", "assert_same_order", "assert_traffic", "bfloat16_law", "dedicate",
    "hold_to_reference", "meshes", "world_mesh",
]  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How a law is run."""

    steps: int = 3
    reshard: bool = True
    policy: dict[str, object] = field(default_factory=lambda: POLICY)
    max_norm: float | None = None
    tolerance: float = 1e-11
    """Largest relative error of any tensor, by its norm."""
    weight_decay: float = 0.1
    group_policy: str = "isolated"
    storage: str = "sharded"
    replicas: int = 1
    """Size of the replicate axis; the rest of the ranks is the shard axis."""
    replicate_async: bool = True
    publish_dtype: str | None = None
    predicate: Callable[[str, nn.Parameter], bool] = lambda name, parameter: parameter.requires_grad
    make_boundary: Callable[[nn.Module], Callable[[nn.Module], bool]] | None = None
    """Gives the ``hook_boundary_predicate`` of a model; None: the default boundaries."""


@dataclass
class Run:
    """A dedicated model with its optimizer and the log of collectives it issued."""

    model: nn.Module
    optimizer: dmuon.Muon
    log: list[tuple[str, str]]


def world_mesh() -> DeviceMesh:
    """Return the 1-D mesh over all ranks."""
    return DeviceMesh(device_type(), torch.arange(dist.get_world_size()))


def meshes(replicas: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the shard and the replicate axis over all ranks; no replicate axis for one replica."""
    if replicas == 1:
        return world_mesh(), None
    grid = init_device_mesh(
        device_type(), (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
    )
    return grid["shard"], grid["replicate"]


def device_type() -> str:
    """Return the device of the backend that this rank runs on."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def dedicate(model: nn.Module, setting: Setting) -> Run:
    """Put ``model`` under the runtime and log every collective by lane."""
    model.to(device_type())
    mesh, replicate_mesh = meshes(setting.replicas)
    dmuon.dedicate_params(
        model,
        mesh,
        setting.predicate,
        param_policy=setting.policy,
        replicate_mesh=replicate_mesh,
        storage=setting.storage,
        publish_dtype=setting.publish_dtype,
        hook_boundary_predicate=setting.make_boundary(model) if setting.make_boundary else None,
        reshard_after_forward=setting.reshard,
        process_group_policy=setting.group_policy,  # type: ignore[arg-type]
    )
    optimizer = dmuon.Muon(
        model,
        weight_decay=setting.weight_decay,
        ns_backend=PolarNewtonSchulz(),
        replicate_async=setting.replicate_async,
    )
    return Run(model, optimizer, _log_collectives(find_runtime(model).transport))


def _log_collectives(transport: Transport) -> list[tuple[str, str]]:
    log: list[tuple[str, str]] = []
    issue = transport._issue

    def logged(
        work: Callable[[], object], axis: Axis, lane: str, key: tuple[str, str] | None, keep: tuple[Tensor, ...]
    ) -> Handle:
        if axis.size > 1:
            log.append((f"{axis.name} {lane}", f"{key} {keep[0].numel()}"))
        return issue(work, axis, lane, key, keep)  # type: ignore[arg-type]

    transport._issue = logged  # type: ignore[assignment, method-assign]
    return log


def assert_same_order(run: Run) -> None:
    """Every rank issued the same collectives in the same order within each lane of each axis."""
    logs: list[list[tuple[str, str]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, run.log)
    shards = dmuon.get_plan(run.model).mesh_shape[1]
    for axis, peer in (("shard", lambda rank: rank // shards), ("replicate", lambda rank: rank % shards)):
        for lane in ("weights", "reduce"):
            lanes = [[what for where, what in log or [] if where == f"{axis} {lane}"] for log in logs]
            first = {peer(rank): lanes[rank] for rank in reversed(range(len(lanes)))}
            differing = [rank for rank, log in enumerate(lanes) if log != first[peer(rank)]]
            assert not differing, f"ranks {differing} differ in the {lane} lane of the {axis} axis: {lanes}"


def assert_traffic(run: Run, passes: int, without: tuple[str, ...] = ()) -> None:
    """Counted collectives and bytes are exactly what the plan says for this rank, ``passes`` times."""
    counted, plan = dmuon.get_counters(run.model).snapshot(), dmuon.get_plan(run.model)
    predicted = {key: item for key, item in plan.rank_traffic[dist.get_rank()].items() if key[1] not in without}
    assert set(counted.comm) == set(predicted)
    for key, item in predicted.items():
        assert counted.comm[key].collectives == item.collectives * passes, key
        assert counted.comm[key].payload_bytes == item.payload_bytes * passes, key
        assert 0.0 <= counted.comm[key].exposed_seconds <= counted.comm[key].seconds
    assert counted.ns_planned_matrices == plan.ranks[dist.get_rank()].matrices * passes


def assert_planned(run: Run) -> None:
    """Whatever ran: passes that reduce and gather in a backward are whole ones of the plan, with exactly its bytes.

    A forward gathers whole rounds, and single units again that some rank needs once more; an update publishes what was
    present. So these two carry planned buckets only. A second backward over one Z2 forward gathers as a forward does.
    """
    counted, plan = dmuon.get_counters(run.model).snapshot().comm, dmuon.get_plan(run.model)
    predicted = dict(plan.rank_traffic[dist.get_rank()])
    predicted |= {(route, "backward"): item for (route, phase), item in predicted.items() if phase == "forward"}
    assert set(counted) <= set(predicted), f"{set(counted) - set(predicted)}: the plan does not know of it"
    for phase in ("reduce", "backward"):
        kinds = [(key, item) for key, item in predicted.items() if key[1] == phase]
        passes = {counted[key].collectives / item.collectives if key in counted else 0.0 for key, item in kinds}
        assert len(passes) <= 1 and all(value.is_integer() for value in passes), (phase, passes)
        for key, item in kinds:
            assert (counted[key].payload_bytes if key in counted else 0) == item.payload_bytes * passes.copy().pop(), (
                key
            )
    rounds = {bucket.numel for bucket in plan.buckets}
    for where, what in run.log:
        if where.endswith("weights") and not what.startswith("None"):
            assert int(what.rpartition(" ")[2]) in rounds, f"{what} is no bucket of the plan"
    keys = [key for key in predicted if key[1] == "forward"]
    assert all(counted[key].collectives >= predicted[key].collectives for key in keys), "the first round is whole"


def hold_to_reference(
    backward: Backward,
    setting: Setting | None = None,
    build: Callable[[], nn.Module] = make,
    loop: Callable[[Run, Setting], None] | None = None,
    reference_backward: Backward | None = None,
    routes: Mapping[str, str] | None = None,
) -> Run:
    """Train both and compare all weights; ``loop`` replaces the plain loop of backward, clip, step, zero_grad.

    ``routes`` are those of the reference, where they are not the plan's.
    """
    setting = setting or Setting()
    plain = build().to(device_type())
    run = dedicate(build(), setting)
    plan = dmuon.get_plan(run.model)
    trainer = ReferenceTrainer(
        plain,
        routes or {entry.name: entry.route for entry in plan.parameters},
        dist.get_world_size(),
        weight_decay=setting.weight_decay,
        splits={entry.name: entry.split_rows for entry in plan.parameters if entry.split_rows},
        views={entry.name: entry.matrix_view for entry in plan.parameters if entry.matrix_view},
        max_norm=setting.max_norm,
    )
    if loop is None:
        for step in range(setting.steps):
            backward(run.model, step, dist.get_rank())
            if setting.max_norm is not None:
                dmuon.clip_grad_norm_(run.optimizer, setting.max_norm)
            run.optimizer.step()
            run.optimizer.zero_grad()
    else:
        loop(run, setting)
    for step in range(setting.steps):
        trainer.step(reference_backward or backward, step)
    assert_close(run.model, plain, setting.tolerance)
    assert_same_order(run)
    assert_planned(run)
    return run


def assert_close(model: nn.Module, plain: nn.Module, tolerance: float) -> None:
    """The dedicated model's weights equal the plain one's."""
    state = dmuon.get_model_state_dict(model)
    expected = {name: p.detach() for name, p in plain.named_parameters(remove_duplicate=False)}
    assert set(expected) <= set(state)
    for name, value in expected.items():
        error = (state[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: relative error {float(error):.3e} on rank {dist.get_rank()}"


def bfloat16_law(setting: Setting, steps: int = 5, tolerance: float = 1e-2) -> None:
    """Compute in bfloat16, reduce in float32, accumulate twice a step: losses are those of one rank that has all data.

    The other ranks' sequences are trained on this rank alone, by a mesh of one rank; Newton-Schulz is the real one.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    tokens = torch.cat([batch(0, number) for number in range(4)])[:8]
    alone = init_device_mesh(device_type(), (world_size, 1), mesh_dim_names=("others", "shard"))["shard"]
    expected = _bfloat16_losses(setting, (alone, None), tokens, steps, 1)
    losses = _bfloat16_losses(setting, meshes(setting.replicas), tokens[rank::world_size], steps, world_size)
    assert expected[-1] < expected[0] - 0.1, f"it learns: {expected}"
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    assert worst <= tolerance, f"losses {losses} on {world_size} ranks, {expected} on one"


def _bfloat16_losses(
    setting: Setting, axes: tuple[DeviceMesh, DeviceMesh | None], tokens: Tensor, steps: int, world_size: int
) -> list[float]:
    """Train a float32 model on ``tokens``, two backwards a step; return the mean losses over ``world_size`` ranks."""
    model = make(dtype=torch.float32).to(device_type())
    policy = {
        "defaults": {"param_dtype": "bf16", "grad_dtype": "fp32"},
        "overrides": [*POLICY["overrides"], {"name": "lm_head", "set": {"output_dtype": "fp32"}}],  # type: ignore[misc]
    }
    dmuon.dedicate_params(
        model, axes[0], setting.predicate, param_policy=policy, replicate_mesh=axes[1], storage=setting.storage,
        reshard_after_forward=setting.reshard, process_group_policy=setting.group_policy,  # type: ignore[arg-type]
    )  # fmt: skip
    widths = {(b.gather_bytes / b.numel, b.reduce_bytes / b.numel) for b in dmuon.get_plan(model).buckets}
    assert widths == {(2.0, 4.0)}, "bytes of an element on the wire: weights, gradients"
    optimizer = dmuon.Muon(model, replicate_async=setting.replicate_async)
    losses = []
    for _ in range(steps):
        first, second = tokens.chunk(2)
        with dmuon.no_sync(model):
            loss = lm_loss(model, first) / 2
            loss.backward()
        other = lm_loss(model, second) / 2
        other.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = (loss + other).detach().float()
        if world_size > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world_size)
    return losses
