"""A kernel that fails as it is told to, under any name; registered by tests alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dmuon_runtime.kernels import SymmetricKernel

__all__ = ["Fault", "Faulty"]

Fault = Literal["none", "raise", "nan", "wrong", "slow"]


class Faulty(SymmetricKernel):
    """torch's products, wrong from launch ``begin`` to before ``end``, counted from 0, as ``fault`` says."""

    name = "faulty"

    def __init__(self, fault: Fault, *, name: str = "faulty", begin: int = 0, end: float = float("inf"),
                 amount: float = 0.5, prepare: Callable[[], None] | None = None) -> None:  # fmt: skip
        self.name = name  # type: ignore[misc]
        self.fault, self.begin, self.end, self.amount = fault, begin, end, amount
        self.launches = 0
        self._prepare = prepare

    def available(self, device: torch.device) -> tuple[bool, str]:
        if self._prepare is not None:
            self._prepare()
        return True, "a test's"

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        launch, self.launches = self.launches, self.launches + 1
        result = alpha * (a @ b) + (0.0 if c is None else beta * c)
        if self.begin <= launch < self.end:
            if self.fault == "raise":
                raise RuntimeError(f"launch {launch} failed")
            if self.fault == "nan":
                result[..., 0, 0] = float("nan")
            if self.fault == "wrong":
                result = result * (1.0 + self.amount)
            if self.fault == "slow":
                time.sleep(self.amount)
        out.copy_(result)
