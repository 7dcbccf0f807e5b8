"""Model and torch's own optimizers, plain, under DDP or under FSDP2, as a checkpoint takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dmuon_runtime as dmuon
from dmuon_runtime.guests import local_part
from dmuon_runtime.runtime import inner_model
from dmuon_runtime.shards import WEIGHT, tensor_offset
from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.exchange import Exchange

__all__ = ["TorchState"]


_AVERAGE = "momentum_average"
"""torch's Muon averages gradients where the runtime's accumulates them, so its momentum is another kind of state: a
checkpoint of the one is refused by the other."""


@dataclass(frozen=True, slots=True)
class _Held:
    """One tensor of the model with its names, where this rank's part begins, and whether this rank saves it."""

    value: Tensor
    names: tuple[str, ...]
    start: int
    is_source: bool


@dataclass(frozen=True, slots=True)
class TorchState:
    """Satisfies :class:`worker.checkpoints.state.CheckpointedState`.

    Every parameter must have its state from construction: torch makes it at the first gradient, and what is not there
    cannot be loaded. Frozen parameters that an optimizer holds are no exception.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    exchange: Exchange
    topic: str = "resume/read"
    """Under which the ranks tell each other of failed reads; new for each load."""

    def parts(self) -> list[dmuon.StatePart]:
        """As in the protocol."""
        held = self._held()
        found = [_part(WEIGHT, entry, entry.value) for entry in held.values()]
        return found + [_part(kind, held[key], value) for key, kind, value in self._slots()]

    def layout(self) -> list[dmuon.StateTensor]:
        """As in the protocol."""
        held = self._held()
        found = [_tensor(WEIGHT, entry, entry.value) for entry in held.values()]
        return found + [_tensor(kind, held[key], value) for key, kind, value in self._slots()]

    @torch.no_grad()
    def load(self, read: Callable[[dmuon.StatePart], Tensor | None]) -> None:
        """As in the protocol.

        Raises:
            CheckpointError: on all ranks, when a part cannot be read on one; nothing has changed.
        """
        values: list[Tensor | None] = []
        parts, failure = self.parts(), ""
        try:
            values = [read(part) for part in parts]
        except Exception as error:  # the other ranks must hear of it before they change anything
            failure = f"{type(error).__name__}: {error}"
        answers = self.exchange.all(self.topic, failure)
        failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        if failed:
            raise CheckpointError("the state cannot be read, nothing was loaded", failed)
        for part, found in zip(parts, values, strict=True):
            if found is not None:
                part.load(found)

    def routes(self) -> dict[str, str]:
        """Return ``muon`` for what torch's Muon trains, and ``adamw`` for the rest."""
        held = self._held()
        return {
            held[id(parameter)].names[0]: "muon" if isinstance(optimizer, torch.optim.Muon) else "adamw"
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def _held(self) -> dict[int, _Held]:
        """Return the model's tensors by id, in its order."""
        tensors = inner_model(self.model).state_dict(keep_vars=True)
        names: dict[int, tuple[str, ...]] = {}
        for name, value in tensors.items():
            names[id(value)] = (*names.get(id(value), ()), name)
        found: dict[int, _Held] = {}
        for index, value in enumerate(tensors.values()):
            if id(value) not in found:
                start, source = 0, self.exchange.rank == index % self.exchange.world_size
                if isinstance(value, DTensor):
                    start, source = tensor_offset(value, names[id(value)][0])
                elif not isinstance(value, nn.Parameter):
                    source = self.exchange.rank == 0  # a buffer may differ by rank
                found[id(value)] = _Held(value, names[id(value)], start, source)
        return found

    def _slots(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield the id of a parameter, the kind of a slot of its state, and the slot."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    slots = optimizer.state[parameter]
                    assert slots, f"a parameter of shape {tuple(parameter.shape)} has no state"
                    averages = isinstance(optimizer, torch.optim.Muon)
                    for slot, value in slots.items():
                        kind = _AVERAGE if averages and slot == "momentum_buffer" else slot
                        yield id(parameter), kind, value


def _part(kind: str, held: _Held, value: Tensor) -> dmuon.StatePart:
    if kind == "step":
        first = held.start == 0 and local_part(held.value).numel() > 0
        return dmuon.StatePart(kind, held.names, (), 0, value, held.is_source and first)
    return dmuon.StatePart(kind, held.names, tuple(held.value.shape), held.start, local_part(value), held.is_source)


def _tensor(kind: str, held: _Held, value: Tensor) -> dmuon.StateTensor:
    shape = () if kind == "step" else tuple(held.value.shape)
    return dmuon.StateTensor(kind, held.names, shape, value.dtype)
