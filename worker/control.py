"""What a running job may be told: a kernel policy, and to stop. All ranks obey at the same step.

A message reaches rank 0 at any time. Rank 0 announces its state in a broadcast of a few bytes on a process group of its
own. The broadcast for step k+1 starts at the beginning of step k, so nobody waits for it, and every rank begins a step
with the same state: no step runs with mixed kernels, and none is left by some ranks only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from worker.contract.kernels import Kernel, KernelPolicy

__all__ = ["Agreement", "Directive", "Mailbox"]

_KERNELS = tuple(Kernel)


@dataclass(frozen=True, slots=True)
class Directive:
    """What holds for one step."""

    policy: KernelPolicy
    stop: bool

    def encode(self) -> torch.Tensor:
        """Return it as int64 [3]: stop, epoch, bit set of tripped kernels."""
        bits = sum(1 << index for index, kernel in enumerate(_KERNELS) if kernel in self.policy.tripped)
        return torch.tensor([int(self.stop), self.policy.epoch, bits], dtype=torch.int64)

    @classmethod
    def decode(cls, encoded: torch.Tensor) -> Directive:
        """Inverse of :meth:`encode`."""
        stop, epoch, bits = (int(value) for value in encoded)
        tripped = frozenset(kernel for index, kernel in enumerate(_KERNELS) if bits >> index & 1)
        return cls(KernelPolicy(epoch=epoch, tripped=tripped), bool(stop))


class Mailbox:
    """Where messages for a rank arrive, from any thread. A policy of an older epoch is ignored."""

    def __init__(self, policy: KernelPolicy | None = None) -> None:
        self._lock = threading.Lock()
        self._directive = Directive(policy or KernelPolicy(), False)

    def set_kernels(self, policy: KernelPolicy) -> None:
        """Take a policy whose epoch is higher than the present one's."""
        with self._lock:
            if policy.epoch > self._directive.policy.epoch:
                self._directive = Directive(policy, self._directive.stop)

    def stop(self) -> None:
        """Ask to stop after the step in progress and the next, which is already agreed."""
        with self._lock:
            self._directive = Directive(self._directive.policy, True)

    def read(self) -> Directive:
        """Return what holds now."""
        with self._lock:
            return self._directive


class Agreement:
    """The broadcast that makes the directive of rank 0 that of all ranks.

    Construction is a collective when there is a process group: every rank makes one.
    """

    def __init__(self, mailbox: Mailbox, *, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._buffer = torch.empty(0)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._announce()

    def next(self, *, last: bool) -> Directive:
        """Return the directive of the step that begins, and announce that of the one after it.

        Args:
            last: True when no step follows; nothing is announced then.
        """
        if self._work is not None:
            self._work.wait()
        directive = Directive.decode(self._buffer)
        self._work = None
        if not (last or directive.stop):
            self._announce()
        return directive

    def _announce(self) -> None:
        self._buffer = self._mailbox.read().encode()
        if self._group is not None:
            self._work = dist.broadcast(self._buffer, src=0, group=self._group, async_op=True)
