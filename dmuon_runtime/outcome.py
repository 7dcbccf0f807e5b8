"""What a step did, read when somebody asks: on CUDA nothing is copied to the host before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["StepOutcome", "UpdateTotals"]

_LOG = logging.getLogger("dmuon_runtime")


class UpdateTotals:
    """Sum of squares of weight changes, before decay, and the number of weights."""

    def __init__(self) -> None:
        self.elements = 0
        self._squares: list[Tensor] = []

    def add_squares(self, squares: Sequence[Tensor], elements: int) -> None:
        """Take in sums of squares, tensors of any shape, over ``elements`` weights in all."""
        self._squares.extend(squares)
        self.elements += elements

    def add(self, changes: Sequence[Tensor], scale: float = 1.0) -> None:
        """Take in the changes of some weights, which are ``scale`` times ``changes``."""
        if changes:
            norms = torch.stack(torch._foreach_norm(list(changes))).double()
            self.add_squares([(norms * scale).square()], sum(change.numel() for change in changes))

    def square_sum(self) -> float:
        """Return the sum of squares."""
        return float(torch.cat([part.reshape(-1) for part in self._squares]).double().sum()) if self._squares else 0.0


class StepOutcome:
    """One optimizer step on this rank; ``skipped`` and ``offenders`` are the same on all ranks."""

    def __init__(self, flags: Tensor, names: Sequence[str], norm: Tensor | None) -> None:
        self._flags = flags
        self._names = names
        self._norm = norm
        self.updates_by_route: dict[str, UpdateTotals] = {}
        self.computed = False
        """True when updates were computed and published; a device withholds those of a skipped step by itself."""

    @cached_property
    def offenders(self) -> tuple[str, ...]:
        """Names of parameters whose mean gradient was infinite or NaN; logged when they are first read."""
        found = tuple(name for name, flag in zip(self._names, self._flags.tolist(), strict=True) if flag)
        if found:
            _LOG.warning("nothing was updated: infinite or NaN gradient of %s", ", ".join(found))
        return found

    @property
    def skipped(self) -> bool:
        """True when nothing was updated on any rank."""
        return bool(self.offenders)

    @cached_property
    def grad_norm(self) -> float | None:
        """Global norm before clipping; None when this step was not clipped."""
        return None if self._norm is None else float(self._norm)

    @cached_property
    def updates(self) -> dict[str, tuple[float, int]]:
        """By route: sum of squares of the change of this rank's weights before decay, and how many weights."""
        return {route: (total.square_sum(), total.elements) for route, total in self.updates_by_route.items()}

    def __repr__(self) -> str:
        return f"StepOutcome(skipped={self.skipped}, offenders={self.offenders}, grad_norm={self.grad_norm})"
