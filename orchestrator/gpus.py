"""Whose the processes on GPUs are: what nodes saw beside what the store knows. Decides on values, and asks nobody.

A GPU is promised to jobs, so a process that is no live attempt's is a leak whoever started it: left by an attempt that
has ended, or somebody else's. One that its node cannot tell from others is unknown, which is neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from worker.contract.gpus import GpuLook, GpuProcess

__all__ = ["GpuSight", "Standing", "standing_of", "why"]


class Standing(StrEnum):
    """Whose a process on a GPU is."""

    LIVE = "live"
    """It belongs to an attempt that has not ended."""
    STRAY = "stray"
    """It belongs to none."""
    UNKNOWN = "unknown"
    """Its node cannot tell which process it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSight:
    """All nodes with GPUs at one time."""

    at: float
    """Wall clock when the nodes were asked."""
    looks: tuple[GpuLook, ...]
    live: frozenset[str]
    """Marks of the attempts that lived before the nodes were asked or after it: one may begin or end meanwhile."""

    def count(self, look: GpuLook, standing: Standing) -> dict[int, int]:
        """Return how many processes of a standing each GPU of a node has that was seen."""
        found = [process.gpu for process in look.processes if standing_of(process, self.live) is standing]
        return {gpu: found.count(gpu) for gpu in look.gpus}

    def processes(self) -> Iterator[tuple[GpuLook, GpuProcess, Standing]]:
        """Yield every process with its node and standing."""
        for look in self.looks:
            for process in look.processes:
                yield look, process, standing_of(process, self.live)


def standing_of(process: GpuProcess, live: frozenset[str]) -> Standing:
    """Decide; ``live`` are the marks of attempts that have not ended."""
    if not process.found:
        return Standing.UNKNOWN
    return Standing.LIVE if process.mark in live else Standing.STRAY


def why(process: GpuProcess, standing: Standing) -> str:
    """Say why it stands so."""
    job, _, number = process.mark.rpartition(":")
    if standing is Standing.LIVE:
        return f"attempt {number} of job {job}"
    if standing is Standing.STRAY and process.mark:
        return f"it was started by attempt {number} of job {job}, which has ended or is not of this service"
    if standing is Standing.STRAY:
        return "nothing of this service started it"
    if process.pid:
        return "its node cannot look the process up: it is of another process namespace, hidden, or has just ended"
    return "the GPU's memory is in use and its driver lists nobody, as in a container without the host's processes"
