"""Train a model on this rank under the runtime and hold it to the reference: weights, traffic, order of collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dmuon_runtime as dmuon
from dmuon_runtime.runtime import find_runtime
from dmuon_runtime.transport import Handle, Transport
from tests.multiproc.models import POLICY, make
from tests.multiproc.reference import Backward, PolarNewtonSchulz, ReferenceTrainer

__all__ = ["Run", "Setting", "assert_same_order", "dedicate", "hold_to_reference", "world_mesh"]


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


def device_type() -> str:
    """Return the device of the backend that this rank runs on."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def dedicate(model: nn.Module, setting: Setting) -> Run:
    """Put ``model`` under the runtime and log every collective by lane."""
    model.to(device_type())
    dmuon.dedicate_params(
        model,
        world_mesh(),
        lambda name, parameter: parameter.requires_grad,
        param_policy=setting.policy,
        hook_boundary_predicate=setting.make_boundary(model) if setting.make_boundary else None,
        reshard_after_forward=setting.reshard,
        process_group_policy=setting.group_policy,  # type: ignore[arg-type]
    )
    optimizer = dmuon.Muon(model, weight_decay=setting.weight_decay, ns_backend=PolarNewtonSchulz())
    return Run(model, optimizer, _log_collectives(find_runtime(model).transport))


def _log_collectives(transport: Transport) -> list[tuple[str, str]]:
    log: list[tuple[str, str]] = []
    issue = transport._issue

    def logged(
        work: Callable[[], object], key: tuple[str, str] | None, lane: str, payload: Tensor, keep: tuple[Tensor, ...]
    ) -> Handle:
        log.append((lane, f"{key} {payload.numel()}"))
        return issue(work, key, lane, payload, keep)  # type: ignore[arg-type]

    transport._issue = logged  # type: ignore[assignment, method-assign]
    return log


def assert_same_order(run: Run) -> None:
    """Every rank issued the same collectives in the same order within each lane."""
    logs: list[list[tuple[str, str]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, run.log)
    for lane in ("gather", "reduce"):
        lanes = [[what for where, what in log or [] if where == lane] for log in logs]
        assert all(other == lanes[0] for other in lanes), f"ranks differ in lane {lane}: {lanes}"


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
    return run


def assert_close(model: nn.Module, plain: nn.Module, tolerance: float) -> None:
    """The dedicated model's weights equal the plain one's."""
    state = dmuon.get_model_state_dict(model)
    expected = {name: p.detach() for name, p in plain.named_parameters(remove_duplicate=False)}
    assert set(expected) <= set(state)
    for name, value in expected.items():
        error = (state[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: relative error {float(error):.3e} on rank {dist.get_rank()}"
