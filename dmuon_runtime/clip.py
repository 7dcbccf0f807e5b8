"""One global gradient norm over all routes, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor

from dmuon_runtime.errors import SettingError
from dmuon_runtime.groups import as_number
from dmuon_runtime.guests import Guest
from dmuon_runtime.muon import Muon
from dmuon_runtime.pieces import Piece
from dmuon_runtime.schedule import Call

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(optimizer: Muon, max_norm: float) -> Tensor:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``; return the norm before it, 0-dim, on the device.

    The norm is that of the mean gradient over ranks, as one process would compute it; each element counts once. When it
    is not finite nothing is scaled, so that the step finds and names the offenders; ``math.inf`` only measures.
    """
    if not isinstance(optimizer, Muon):
        raise SettingError(
            f"clip_grad_norm_ takes the Muon of a dedicated model, not {type(optimizer).__name__}; for other "
            "optimizers use torch.nn.utils.clip_grad_norm_"
        )
    if not as_number(max_norm) > 0:
        raise SettingError(f"max_norm must be a positive number, not {max_norm!r}; pass math.inf to measure only")
    runtime = optimizer.runtime
    runtime.watch.note_outside()
    present = runtime.schedule.meet(Call.CLIP)
    everyone: list[Piece | Guest] = [piece for piece in optimizer.pieces if present[piece.index]]
    everyone += [guest for guest in optimizer.guests if guest.has_gradient]
    square = torch.zeros((), dtype=torch.float64, device=runtime.transport.device)
    counted = [member.gradient for member in everyone if member.counts_here]
    if counted:
        square = torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float64)).square().sum()
    norm = runtime.transport.sum_values(square).sqrt()
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    coefficient = torch.where(torch.isfinite(norm), coefficient, 1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for member in everyone:
        by_dtype.setdefault(member.gradient.dtype, []).append(member.gradient)
    for dtype, gradients in by_dtype.items():
        torch._foreach_mul_(gradients, coefficient.to(dtype))
    optimizer.clip_norm = norm
    return norm.to(torch.float32)
