"""A kernel that fails as it is told to, under any name; registered by tests alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dmuon_runtime.kernels import KERNELS, SymmetricKernel
from dmuon_runtime.ledger import LEDGER

__all__ = ["Fault", "Faulty", "Impostor"]

Fault = Literal["none", "raise", "nan", "wrong", "slow"]


class Faulty(SymmetricKernel):
    """torch's products, wrong from launch ``begin`` to before ``end``, counted from 0, as ``fault`` says.

    Launches of other threads than the main one are right and do not count: so a swap can prepare what then fails.
    ``off_main`` is called where such a thread asks whether the kernel is available.
    """

    def __init__(
        self, fault: Fault, *, name: str = "faulty", begin: int = 0, end: float = float("inf"), amount: float = 0.5,
        off_main: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.name = name  # type: ignore[misc]
        self.fault, self.begin, self.end, self.amount = fault, begin, end, amount
        self.launches = 0
        self._off_main = off_main

    def available(self, device: torch.device) -> tuple[bool, str]:
        if threading.current_thread() is not threading.main_thread():
            self._off_main()
        return True, "a test's"

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        result = alpha * (a @ b) + (0.0 if c is None else beta * c)
        if threading.current_thread() is threading.main_thread():
            launch, self.launches = self.launches, self.launches + 1
            if self.begin <= launch < self.end:
                result = self._spoil(result, launch)
        out.copy_(result)

    def _spoil(self, result: Tensor, launch: int) -> Tensor:
        if self.fault == "raise":
            raise RuntimeError(f"launch {launch} failed")
        if self.fault == "nan":
            result[..., 0, 0] = float("nan")
        if self.fault == "slow":
            time.sleep(self.amount)
        return result * (1.0 + self.amount) if self.fault == "wrong" else result


class Impostor(Faulty):
    """Answers to its name and lets another kernel do the work, or, ``silently``, does it where nobody counts."""

    silently = False

    def symmetric(self, a: Tensor, b: Tensor, c: Tensor | None = None, **settings: object) -> Tensor:
        """As in the base class."""
        if self.silently:
            with LEDGER.muted():
                return KERNELS["cublas"].symmetric(a, b, c, **settings)  # type: ignore[arg-type]
        return KERNELS["cublas"].symmetric(a, b, c, **settings)  # type: ignore[arg-type]
