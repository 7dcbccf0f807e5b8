"""What a running job may be told, and what its ranks have to say to each other. All ranks obey at the same step.

A message reaches rank 0 at any time. Beside it every rank has a voice: that it is ready for a swap, that a kernel
failed on it. Both travel in one small vector that is maximised over all ranks, element by element, on a process group
of its own. The maximum for step k+1 starts at the beginning of step k, so nobody waits for it, and every rank begins a
step with the same words: what follows from them alone follows on all ranks at once. No step runs with mixed kernels,
and none is left by some ranks only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from dmuon_runtime.progress import PROGRESS
from worker.contract.kernels import Algorithm, CoefficientSet, Kernel, KernelPolicy, KernelTarget, SwapOrder

__all__ = ["Agreement", "Directive", "Mailbox"]

_KERNELS: Final = tuple(Kernel)
_SETS: Final = ("tripped", "disabled", "metrics_only")
_TARGET: Final[dict[str, tuple[str, ...]]] = {
    "kernel": tuple(Kernel), "algorithm": tuple(Algorithm), "coefficients": tuple(CoefficientSet),
}  # fmt: skip
_NUM_FIXED: Final = 2 + len(_SETS) + len(_KERNELS) + 2 + len(_TARGET)


@dataclass(frozen=True, slots=True)
class Directive:
    """What holds for one step. Of the policy, ``target`` is not told: it is for the start of an attempt."""

    policy: KernelPolicy
    stop: bool
    heard: tuple[int, ...] = field(default=(), compare=False)
    """The greatest of each thing that a rank had to say."""

    def encode(self) -> torch.Tensor:
        """Return it as int64: stop, epoch, bit sets, epochs of resets, and the swap; no value is negative."""
        policy, swap = self.policy, self.policy.swap
        values = [int(self.stop), policy.epoch, *(_bits(getattr(policy, name)) for name in _SETS)]
        values += [policy.resets.get(kernel, 0) for kernel in _KERNELS]
        values += [0, 0] if swap is None else [swap.number, round(swap.deadline_s * 1000)]
        for name, words in _TARGET.items():
            word = None if swap is None else getattr(swap.target, name)
            values.append(0 if word is None else 1 + words.index(word))
        return torch.tensor(values, dtype=torch.int64)

    @classmethod
    def decode(cls, encoded: torch.Tensor) -> Directive:
        """Inverse of :meth:`encode`; what follows in the vector is :attr:`heard`."""
        values = [int(value) for value in encoded]
        fixed = iter(values[:_NUM_FIXED])
        stop, epoch = next(fixed), next(fixed)
        sets = {name: _kernels(next(fixed)) for name in _SETS}
        resets = {kernel: number for kernel in _KERNELS if (number := next(fixed))}
        number, milliseconds = next(fixed), next(fixed)
        target = {name: words[code - 1] for name, words in _TARGET.items() if (code := next(fixed))}
        swap = None
        if number:
            asked = KernelTarget.model_validate(target)
            swap = SwapOrder(number=number, target=asked, deadline_s=milliseconds / 1000)
        policy = KernelPolicy(epoch=epoch, resets=resets, swap=swap, **sets)
        return cls(policy, bool(stop), tuple(values[_NUM_FIXED:]))


def _bits(kernels: frozenset[Kernel]) -> int:
    return sum(1 << index for index, kernel in enumerate(_KERNELS) if kernel in kernels)


def _kernels(bits: int) -> frozenset[Kernel]:
    return frozenset(kernel for index, kernel in enumerate(_KERNELS) if bits >> index & 1)


class Mailbox:
    """Where messages for a rank arrive, from any thread. A policy of an older epoch is ignored."""

    def __init__(self, policy: KernelPolicy | None = None) -> None:
        self._lock = threading.Lock()
        self.first = policy or KernelPolicy()
        """With what the attempt began, on every rank alike; what came since holds from an agreed step on."""
        self._directive = Directive(self.first, False)

    def set_kernels(self, policy: KernelPolicy) -> None:
        """Take a policy whose epoch is higher than the present one's."""
        with self._lock:
            if policy.epoch > self._directive.policy.epoch:
                self._directive = replace(self._directive, policy=policy)

    def stop(self) -> None:
        """Ask to stop after the step in progress and the next, which is already agreed."""
        with self._lock:
            self._directive = replace(self._directive, stop=True)

    def read(self) -> Directive:
        """Return what holds now."""
        with self._lock:
            return self._directive


class Agreement:
    """The maximum over ranks that gives all of them the directive of rank 0, and the loudest of each voice.

    Construction is a collective when there is a process group: every rank makes one.
    """

    def __init__(
        self, mailbox: Mailbox, *, timeout_s: float, voice: Callable[[], Sequence[int]] = tuple[int, ...]
    ) -> None:
        """
        Args:
            mailbox: only rank 0's counts.
            timeout_s: how long a rank may keep the others waiting.
            voice: what this rank has to say, as many numbers on every rank and every time.
        """
        self._mailbox, self._voice = mailbox, voice
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._buffer = torch.empty(0)
        self._leads = True
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._leads = dist.get_rank() == 0
        self._announce()

    def next(self, *, last: bool) -> Directive:
        """Return the directive of the step that begins, and announce that of the one after it.

        Args:
            last: True when no step follows; nothing is announced then.
        """
        if self._work is not None:
            with PROGRESS.waiting("agreement on what holds for this step"):
                self._work.wait()
        directive = Directive.decode(self._buffer)
        self._work = None
        if not (last or directive.stop):
            self._announce()
        return directive

    def _announce(self) -> None:
        words = self._mailbox.read().encode()
        words = words if self._leads else torch.zeros_like(words)
        self._buffer = torch.cat([words, torch.tensor(self._voice(), dtype=torch.int64)])
        if self._group is not None:
            self._work = dist.all_reduce(self._buffer, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
