"""torch's Muon for FSDP2's shards: each matrix is gathered, orthogonalised whole, and cut again.

``torch.optim.Muon`` leaves the matrix products to DTensor, which fails on uneven shards (an in-place operation that
would change a placement). The arithmetic here is torch's, in the same order, so plain tensors get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from dmuon_runtime.guests import local_part
from dmuon_runtime.outcome import UpdateTotals

__all__ = ["WholeMatrixMuon", "sum_over_mesh"]


class WholeMatrixMuon(torch.optim.Muon):
    """``torch.optim.Muon`` with the same arguments, state and results, for plain tensors and DTensors alike.

    With DTensors :meth:`step` is collective: one small reduction that agrees which matrices have a gradient on some
    rank (one without contributes zeros), then one all-gather a matrix in the order of the groups. Every rank computes
    every matrix: simple and exact, and as slow as that is; the runtime's owners are there to do better.
    """

    last_updates: UpdateTotals | None = None
    """How large the last step's updates of this rank's parts were."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every matrix that has a gradient on some rank."""
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_updates = UpdateTotals()
        with torch.no_grad():
            for group in self.param_groups:
                parameters = cast("list[Tensor]", group["params"])
                for parameter, present in zip(parameters, _agree(parameters), strict=True):
                    if present:
                        self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = _local_gradient(parameter)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=gradient.dtype)
        buffer, momentum = local_part(state["momentum_buffer"]), float(group["momentum"])
        buffer.lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()  # normalised in place
        whole = _zeropower_via_newtonschulz(
            _gather(ahead, parameter), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rate = float(group["lr"])
        weight = local_part(parameter)
        weight.mul_(1 - rate * group["weight_decay"])
        scale, part = _adjust_lr(rate, group["adjust_lr_fn"], parameter.shape), _cut(whole, parameter)
        weight.add_(part, alpha=-scale)
        assert self.last_updates is not None, "a step is under way"
        self.last_updates.add([part.float()], scale)


def _agree(parameters: Sequence[Tensor]) -> list[bool]:
    """Say of each parameter whether it has a gradient on any rank of its mesh."""
    present = [parameter.grad is not None for parameter in parameters]
    by_mesh: dict[DeviceMesh, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            by_mesh.setdefault(parameter.device_mesh, []).append(index)
    for mesh, indices in by_mesh.items():
        device = local_part(parameters[indices[0]]).device
        flags = torch.tensor([float(present[index]) for index in indices], device=device)
        for index, total in zip(indices, sum_over_mesh(flags, mesh).tolist(), strict=True):
            present[index] = total > 0
    return present


def sum_over_mesh(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of ``local`` (any shape, the same on all ranks) over all ranks of ``mesh``; collective."""
    partial = DTensor.from_local(local, mesh, [Partial()] * mesh.ndim, run_check=False)
    return partial.full_tensor()


def _local_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(local_part(parameter))
    return local_part(parameter.grad)


def _gather(local: Tensor, like: Tensor) -> Tensor:
    """Return the whole matrix [m, n] of which ``local`` is this rank's part; uneven and empty parts included."""
    if not isinstance(like, DTensor):
        return local
    part = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return part.full_tensor()


def _cut(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a matrix that all ranks have; no communication."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()
