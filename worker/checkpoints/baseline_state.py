"""What a checkpoint asks of a baseline: torch's optimizers, on a plain model, under DDP or sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dmuon_runtime as dmuon
from dmuon_runtime.baselines import Tandem
from dmuon_runtime.guests import local_part
from dmuon_runtime.runtime import inner_model
from dmuon_runtime.shards import WEIGHT, tensor_offset

__all__ = ["BaselineState"]

_KINDS = {"momentum_buffer": "momentum_average", "step": "step", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""torch's Muon averages gradients where the runtime's accumulates them, so its momentum is another kind of state: a
checkpoint of the one is no checkpoint of the other."""


@dataclass(frozen=True, slots=True)
class BaselineState:
    """A model and the optimizers that train it."""

    model: nn.Module
    optimizer: Tandem

    def parts(self) -> list[dmuon.StatePart]:
        """As in :class:`worker.checkpoints.state.CheckpointedState`."""
        names = self._names()
        found = [_part(WEIGHT, names[key], value, value) for key, value in self._tensors().items()]
        for parameter, kind, state in self._state():
            if kind == "step":
                start, first = _place(parameter, names[id(parameter)][0])
                source = first and start == 0 and local_part(parameter).numel() > 0
                found.append(dmuon.StatePart(kind, names[id(parameter)], (), 0, state, source))
            else:
                found.append(_part(kind, names[id(parameter)], parameter, state))
        return found

    def layout(self) -> list[dmuon.StateTensor]:
        """As in :class:`worker.checkpoints.state.CheckpointedState`."""
        names = self._names()
        found = [
            dmuon.StateTensor(WEIGHT, names[key], tuple(value.shape), value.dtype)
            for key, value in self._tensors().items()
        ]
        found += [
            dmuon.StateTensor(kind, names[id(parameter)], tuple(state.shape), state.dtype)
            for parameter, kind, state in self._state()
        ]
        return found

    @torch.no_grad()
    def load(self, read: Callable[[dmuon.StatePart], Tensor | None]) -> None:
        """As in :class:`worker.checkpoints.state.CheckpointedState`.

        Raises:
            StateMismatch: reading failed on some rank; nothing was changed on any.
        """
        parts = self.parts()
        values: list[Tensor | None] = []
        failure = ""
        try:
            values = [read(part) for part in parts]
        except Exception as error:  # the other ranks must hear of it before they change anything
            failure = f"{type(error).__name__}: {error}"
        texts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(texts, failure)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if failed:
            raise dmuon.StateMismatch("the state cannot be read, nothing was loaded: " + "; ".join(failed), failed)
        for part, found in zip(parts, values, strict=True):
            if found is not None:
                part.load(found)

    def routes(self) -> dict[str, str]:
        """As in :class:`worker.checkpoints.state.CheckpointedState`."""
        names = self._names()
        return {
            names[id(parameter)][0]: "muon" if group["name"] == "muon" else "adamw"
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }

    def _tensors(self) -> dict[int, Tensor]:
        """Parameters and buffers by id, each once."""
        return {id(value): value for value in inner_model(self.model).state_dict(keep_vars=True).values()}

    def _names(self) -> dict[int, tuple[str, ...]]:
        names: dict[int, tuple[str, ...]] = {}
        for name, value in inner_model(self.model).state_dict(keep_vars=True).items():
            names[id(value)] = (*names.get(id(value), ()), name)
        return names

    def _state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        for each in self.optimizer.optimizers:
            for group in each.param_groups:
                for parameter in group["params"]:
                    for key, kind in _KINDS.items():
                        if key in each.state[parameter]:
                            yield parameter, kind, each.state[parameter][key]


def _part(kind: str, names: tuple[str, ...], like: Tensor, tensor: Tensor) -> dmuon.StatePart:
    start, first = _place(like, names[0])
    return dmuon.StatePart(kind, names, tuple(like.shape), start, local_part(tensor), first)


def _place(tensor: Tensor, name: str) -> tuple[int, bool]:
    """Return where this rank's part begins, and whether this rank saves it: of replicas the first."""
    return tensor_offset(tensor, name) if isinstance(tensor, DTensor) else (0, dist.get_rank() == 0)
