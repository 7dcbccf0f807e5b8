"""What the control plane needs of a cluster. :mod:`orchestrator.launcher` does it with Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from worker.contract.gpus import GpuLook
from worker.contract.kernels import KernelPolicy
from worker.contract.messages import AttemptStart, PollBatch, StopRequest

__all__ = ["AttemptRef", "Capacity", "Launcher", "Resources"]


@dataclass(frozen=True, slots=True)
class Resources:
    """An amount of CPUs, GPUs and bytes of memory."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: float = 0.0

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.cpus + other.cpus, self.gpus + other.gpus, self.memory_bytes + other.memory_bytes)

    def __sub__(self, other: Resources) -> Resources:
        return self + other.times(-1)

    def times(self, number: float) -> Resources:
        """Return this amount ``number`` times."""
        return Resources(self.cpus * number, self.gpus * number, self.memory_bytes * number)

    def holds(self, other: Resources) -> float:
        """Return how many whole times ``other`` fits in here; infinity for nothing."""
        pairs = ((self.cpus, other.cpus), (self.gpus, other.gpus), (self.memory_bytes, other.memory_bytes))
        return min((max(0.0, (have + 1e-9) // need) for have, need in pairs if need > 0), default=float("inf"))

    def __str__(self) -> str:
        memory = f" and {self.memory_bytes / 2**30:.2f} GiB of memory" if self.memory_bytes else ""
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs{memory}"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What each node of the cluster has in all, and what is free in the whole cluster."""

    nodes: tuple[Resources, ...]
    free: Resources


@dataclass(frozen=True, slots=True)
class AttemptRef:
    """Which attempt a call is about, and the fence that allows it."""

    job_id: str
    attempt: int
    fence: str


class Launcher(Protocol):
    """Starts attempts and speaks to their supervisors. Calls block, each for a bounded time.

    Every method raises :class:`~orchestrator.errors.LauncherUnavailable` when the cluster cannot be reached or does
    not answer in time: that says nothing about the attempt. Methods that speak to a supervisor raise
    :class:`~orchestrator.errors.SupervisorGone` on positive evidence that it is dead or was never made.
    """

    def capacity(self) -> Capacity:
        """Return what there is and what is free."""
        ...

    def gpu_looks(self) -> tuple[GpuLook, ...]:
        """Return who holds the GPUs of each node that has some; a node that cannot be asked is one with a problem."""
        ...

    def start_attempt(self, start: AttemptStart) -> None:
        """Make the supervisor and start it; one that exists is left as it is."""
        ...

    def poll(self, ref: AttemptRef, cursor: int, limit: int) -> PollBatch:
        """Return the entries that follow ``cursor``."""
        ...

    def set_kernels(self, ref: AttemptRef, policy: KernelPolicy) -> None:
        """Tell a running attempt what it may launch."""
        ...

    def stop(self, ref: AttemptRef, request: StopRequest) -> None:
        """Ask an attempt to end. Asking again is harmless."""
        ...

    def leave(self, ref: AttemptRef) -> None:
        """Let the supervisor go, after its end was stored."""
        ...

    def kill(self, ref: AttemptRef) -> None:
        """End a supervisor that does not answer, and its workers with it. Asking again is harmless."""
        ...

    def remains(self, ref: AttemptRef) -> tuple[str, ...]:
        """Return the names of actors and placement groups of an attempt that still exist."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...
