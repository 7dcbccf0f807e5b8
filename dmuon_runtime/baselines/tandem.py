"""Several torch optimizers driven as one: one clip, one decision on non-finite gradients, one list of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon_runtime.baselines.whole_matrix import WholeMatrixMuon, sum_over_mesh
from dmuon_runtime.errors import MeshError, NonFiniteGradient, SettingError
from dmuon_runtime.guests import local_part
from dmuon_runtime.outcome import StepOutcome, UpdateTotals
from dmuon_runtime.runtime import inner_model

__all__ = ["Tandem"]


class Tandem:
    """The optimizers of :func:`build_optimizers` as a training loop drives one.

    Args:
        model: the model whose parameters they hold: plain, under DDP, or sharded by FSDP2 over one mesh.
        optimizers: stepped in this order; ``param_groups`` is their groups, one list, each with its own ``lr``.
        non_finite: what an infinite or NaN gradient does on all ranks: ``skip`` the step without a trace, or ``raise``
            :class:`NonFiniteGradient`.

    State exists from construction. With DTensors :meth:`step` and :meth:`clip` are collective over their mesh. On CUDA
    the decision is read on the host, which waits for the device: a baseline may, the runtime must not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        non_finite: Literal["skip", "raise"] = "skip",
    ) -> None:
        if non_finite not in ("skip", "raise"):
            raise SettingError(f'non_finite must be "skip" or "raise", not {non_finite!r}')
        self.optimizers, self.non_finite = tuple(optimizers), non_finite
        self.param_groups: list[dict[str, Any]] = [group for each in optimizers for group in each.param_groups]
        self.last_step: StepOutcome | None = None
        self._model = model
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        self._parameters = {n: p for n, p in inner_model(model).named_parameters() if id(p) in held}
        self._mesh = _one_mesh(self._parameters)
        self._norm: Tensor | None = None
        for each in optimizers:
            each.register_load_state_dict_post_hook(_fill_state)
            _fill_state(each)

    def zero_grad(self) -> None:
        """Discard all gradients."""
        for each in self.optimizers:
            each.zero_grad()
        self._norm = None

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``; return the global norm before it, 0-dim float32.

        Each element counts once, whatever the mesh. When the norm is not finite nothing is scaled: the step finds and
        names the offenders.
        """
        if not max_norm > 0:
            raise SettingError(f"max_norm must be positive, not {max_norm!r}; pass math.inf to measure only")
        gradients = list(self._gradients().values())
        device = local_part(next(iter(self._parameters.values()))).device
        square = torch.zeros((), dtype=torch.float64, device=device)
        if gradients and self._counts_here():
            square = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
        norm = (square if self._mesh is None else sum_over_mesh(square, self._mesh)).sqrt()
        factor = torch.where(torch.isfinite(norm), torch.clamp(max_norm / (norm + 1e-6), max=1.0), 1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        self._norm = norm
        return norm.to(torch.float32)

    @torch.no_grad()
    def step(self) -> None:
        """Step every optimizer, or none of them on any rank; ``last_step`` then tells what happened."""
        outcome = StepOutcome(self._non_finite_flags(), list(self._parameters), self._norm)
        self.last_step, self._norm = outcome, None
        if not outcome.skipped:
            for each in self.optimizers:
                each.step()
            if self._counts_here():
                outcome.updates_by_route = dict(map(_updates, self.optimizers))
        elif self.non_finite == "raise":
            raise NonFiniteGradient(
                f"infinite or NaN gradient of {', '.join(outcome.offenders)}; nothing was updated. Lower the learning "
                'rate, look at the batch, or use non_finite="skip"',
                outcome.offenders,
            )

    def state_by_name(self, *, whole: bool = False) -> dict[str, Any]:
        """Return ``state`` by parameter name and ``param_groups`` with names; with ``whole`` gathered, on rank 0 alone.

        Tensors are the optimizers' own unless ``whole``: DTensors stay sharded, as torch.distributed.checkpoint takes
        them. Collective.
        """
        options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
        return dict(get_optimizer_state_dict(self._model, self.optimizers, options=options))

    def load_state_by_name(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_by_name` returned, sharded as it is there; collective."""
        set_optimizer_state_dict(self._model, self.optimizers, dict(state))

    def _gradients(self) -> dict[str, Tensor]:
        """This rank's parts of the gradients that exist and are not empty, by name."""
        found = {n: local_part(p.grad) for n, p in self._parameters.items() if p.grad is not None}
        return {name: gradient for name, gradient in found.items() if gradient.numel() > 0}

    def _non_finite_flags(self) -> Tensor:
        """Return [parameters], above 0 where the gradient has an infinite or NaN element on some rank."""
        found = self._gradients()
        device = local_part(next(iter(self._parameters.values()))).device
        bad = {name: ~torch.isfinite(gradient).all() for name, gradient in found.items()}
        zero = torch.zeros((), dtype=torch.bool, device=device)
        flags = torch.stack([bad.get(name, zero) for name in self._parameters]).to(torch.float32)
        return flags if self._mesh is None else sum_over_mesh(flags, self._mesh)

    def _counts_here(self) -> bool:
        """True on one rank for each element: replicas of a shard are counted once."""
        if self._mesh is None:
            return True
        place = self._mesh.get_coordinate()
        assert place is not None, "this rank is on the mesh"
        placements = next(p.placements for p in self._parameters.values() if isinstance(p, DTensor))
        return all(place[axis] == 0 for axis, kind in enumerate(placements) if kind.is_replicate())


def _updates(optimizer: torch.optim.Optimizer) -> tuple[str, UpdateTotals]:
    """Return the route of ``optimizer`` and how large the update was that it has just made."""
    if isinstance(optimizer, WholeMatrixMuon):
        assert optimizer.last_updates is not None, "it has just stepped"
        return "muon", optimizer.last_updates
    return "adamw", _AdamWUpdates(optimizer)


class _AdamWUpdates(UpdateTotals):
    """The update that torch's AdamW has just made, computed from its state when somebody asks.

    So a step is charged with nothing that torch does not do. It must be asked for before the next step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._parts: list[tuple[dict[str, Any], float, list[dict[str, Tensor]]]] = []
        for group in optimizer.param_groups:
            moved = [optimizer.state[parameter] for parameter in group["params"] if parameter.grad is not None]
            self.elements += sum(local_part(state["exp_avg"]).numel() for state in moved)
            settings = {key: group[key] for key in ("lr", "betas", "eps")}
            for number in {float(state["step"]) for state in moved}:
                self._parts.append((settings, number, [state for state in moved if float(state["step"]) == number]))

    def square_sum(self, device: torch.device) -> Tensor:
        """Return the sum of squares of ``lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)``."""
        totals = UpdateTotals()
        for settings, number, states in self._parts:
            assert all(float(state["step"]) == number for state in states), "asked for after the next step"
            beta1, beta2 = settings["betas"]
            denominators = torch._foreach_sqrt([local_part(state["exp_avg_sq"]) for state in states])
            torch._foreach_div_(denominators, (1 - beta2**number) ** 0.5)
            torch._foreach_add_(denominators, settings["eps"])
            changes = torch._foreach_div([local_part(state["exp_avg"]) for state in states], denominators)
            totals.add(changes, float(settings["lr"]) / (1 - beta1**number))
        return totals.square_sum(device)


def _one_mesh(parameters: Mapping[str, nn.Parameter]) -> DeviceMesh | None:
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters.values()}
    if len(meshes) > 1:
        raise MeshError(
            f"one optimizer steps on one mesh, but the parameters lie on {len(meshes)} (None is a plain tensor): "
            f"{sorted(map(str, meshes))}; shard the whole model over one mesh",
            list(parameters),
        )
    return meshes.pop() if meshes else None


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter that has no state the one of no steps, as torch would make it at the first gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            if isinstance(optimizer, torch.optim.Muon):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            else:
                optimizer.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32),
                    exp_avg=torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    exp_avg_sq=torch.zeros_like(parameter, memory_format=torch.preserve_format),
                )
