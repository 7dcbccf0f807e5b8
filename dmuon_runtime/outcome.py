"""What a step did, read when somebody asks; a host that will ask has it sent while the device works."""

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

    def square_sum(self, device: torch.device) -> Tensor:
        """Return the sum of squares, 0-dim float64; they are on ``device``."""
        if not self._squares:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.cat([part.reshape(-1) for part in self._squares]).double().sum()


class _OnTheWay:
    """Numbers that a device copies to the host behind the work that it has."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
        self._copied: torch.Event | None = None
        if numbers.device.type == "cuda":
            self._copied = torch.Event(numbers.device)
            self._copied.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[float]:
        """Return them when they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(number) for number in self._numbers.tolist()]


class StepOutcome:
    """One optimizer step on this rank; ``skipped`` and ``offenders`` are the same on all ranks."""

    def __init__(self, flags: Tensor, names: Sequence[str], norm: Tensor | None) -> None:
        self._flags = flags
        self._names = names
        self._norm = norm
        self._sent: _OnTheWay | None = None
        self.updates_by_route: dict[str, UpdateTotals] = {}
        self.computed = False
        """True when updates were computed and published; a device withholds those of a skipped step by itself."""

    def send(self) -> None:
        """Have all that can be asked here summed, and on CUDA copied behind the step's work, without waiting.

        For a host that will ask once the device is done: what is asked then launches nothing, and the device stands
        still the less for it. To be called when the step is over; the second time does nothing.
        """
        if self._sent is not None:
            return
        norm = self._flags.new_zeros(()) if self._norm is None else self._norm
        self._sent = _OnTheWay(torch.stack([n.double() for n in (norm, self._flags.sum(), *self._square_sums())]))

    def _square_sums(self) -> list[Tensor]:
        return [total.square_sum(self._flags.device) for total in self.updates_by_route.values()]

    @cached_property
    def _read(self) -> list[float]:
        """The norm, the number of flags that are set, and the sums of squares."""
        assert self._sent is not None, "sent before"
        return self._sent.read()

    @cached_property
    def offenders(self) -> tuple[str, ...]:
        """Names of parameters whose mean gradient was infinite or NaN; logged when they are first read."""
        if self._sent is not None and self._read[1] == 0:
            return ()
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
        if self._norm is None:
            return None
        return float(self._norm) if self._sent is None else self._read[0]

    @cached_property
    def updates(self) -> dict[str, tuple[float, int]]:
        """By route: sum of squares of the change of this rank's weights before decay, and how many weights."""
        sums = [float(each) for each in self._square_sums()] if self._sent is None else self._read[2:]
        return {
            route: (square_sum, total.elements)
            for (route, total), square_sum in zip(self.updates_by_route.items(), sums, strict=True)
        }

    def __repr__(self) -> str:
        return f"StepOutcome(skipped={self.skipped}, offenders={self.offenders}, grad_norm={self.grad_norm})"
