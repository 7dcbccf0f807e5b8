"""What a checkpoint asks of a model and its optimizer, and what dmuon answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

import dmuon_runtime as dmuon
from dmuon_runtime.runtime import inner_model

__all__ = ["DTYPES", "DTYPE_CODES", "CheckpointedState", "DmuonState"]

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""Dtypes by their names in safetensors."""
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class CheckpointedState(Protocol):
    """Model and optimizer of one rank. An optimizer that is not dmuon's needs just this to be saved and resumed."""

    def parts(self) -> list[dmuon.StatePart]:
        """Return what this rank holds, sharing memory with it; over all ranks each element has one source."""
        ...

    def layout(self) -> list[dmuon.StateTensor]:
        """Return every tensor of the state of all ranks, the same list on each."""
        ...

    def load(self, read: Callable[[dmuon.StatePart], Tensor | None]) -> None:
        """Load every part from what ``read`` returns, None leaving it as it is; all ranks call it.

        ``read`` must be called for all parts before anything changes, and its failure must fail every rank.
        """
        ...

    def routes(self) -> dict[str, str]:
        """Return the route of every parameter that trains, by its first name."""
        ...


@dataclass(frozen=True, slots=True)
class DmuonState:
    """A dedicated model and its :class:`dmuon_runtime.Muon`."""

    model: nn.Module
    optimizer: dmuon.Muon

    def parts(self) -> list[dmuon.StatePart]:
        """As in :class:`CheckpointedState`."""
        return dmuon.state_parts(self.model, self.optimizer)

    def layout(self) -> list[dmuon.StateTensor]:
        """As in :class:`CheckpointedState`."""
        return dmuon.state_layout(self.model, self.optimizer)

    def load(self, read: Callable[[dmuon.StatePart], Tensor | None]) -> None:
        """As in :class:`CheckpointedState`."""
        dmuon.load_state_parts(self.model, self.optimizer, read)

    def routes(self) -> dict[str, str]:
        """Return the routes that the optimizer's groups came to."""
        names = {id(parameter): name for name, parameter in inner_model(self.model).named_parameters()}
        return {
            names[id(parameter)]: str(group["route"])
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
