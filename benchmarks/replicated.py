"""Contestants whose ranks all keep the whole model: DDP with AdamW, and the runtime's replicated storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import dmuon_runtime as dmuon
from benchmarks.contestants import ADAMW_LR, LR, WEIGHT_DECAY, Contestant

__all__ = ["REPLICATED", "ddp_adamw", "ours_replicated"]


@dataclass(slots=True)
class _Autocast(Contestant):
    """Computes in bfloat16 where the device is a GPU, with parameters as they are."""

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """As in :class:`Contestant`."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            return Contestant.forward_backward(self, tokens)


def ddp_adamw(model: nn.Module, grid: DeviceMesh, dtype: torch.dtype) -> Contestant:
    """DDP with fused AdamW for everything; ``dtype`` is what autocast computes in on a GPU."""
    assert dtype in (torch.bfloat16, torch.float32)
    wrapped = DistributedDataParallel(model, process_group=grid["shard"].get_group())
    return _Autocast(wrapped, [torch.optim.AdamW(model.parameters(), ADAMW_LR, weight_decay=WEIGHT_DECAY, fused=True)])


def ours_replicated(model: nn.Module, grid: DeviceMesh, dtype: torch.dtype) -> Contestant:
    """The runtime for every parameter, all of them whole on every rank."""
    policy = {
        "defaults": {"route": "muon", "param_dtype": dtype, "grad_dtype": torch.float32},
        "overrides": [
            {"name": ["norm"], "set": {"route": "adamw"}},
            {"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}},
        ],
    }
    dmuon.dedicate_params(model, grid["shard"], lambda _, p: p.requires_grad, storage="replicated", param_policy=policy)
    optimizer = dmuon.Muon(model, LR, weight_decay=WEIGHT_DECAY, adamw_lr=ADAMW_LR, adamw_weight_decay=WEIGHT_DECAY)
    return Contestant(model, [optimizer], counted=True)


REPLICATED: Mapping[str, Callable[[nn.Module, DeviceMesh, torch.dtype], Contestant]] = {
    "ddp + adamw": ddp_adamw, "ours replicated": ours_replicated,
}  # fmt: skip
