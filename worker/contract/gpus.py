"""Who holds the GPUs of a node: what a node answers when it is asked, and the mark that an attempt's processes bear."""

from __future__ import annotations

from worker.contract.errors import Words
from worker.contract.messages import Message

__all__ = ["GpuLook", "GpuProcess", "attempt_mark"]


def attempt_mark(job_id: str, attempt: int) -> str:
    """What the processes of an attempt bear, and those that they start."""
    return f"{job_id}:{attempt}"


class GpuProcess(Message):
    """A process that holds memory of a GPU, as its node sees it."""

    pid: int
    gpu: int
    """Index by NVML, which is that of ``nvidia-smi``."""
    uuid: str
    bytes: int | None = None
    """Of the GPU's memory; None where the driver does not say."""
    found: bool = True
    """False when the node cannot tell which process this is: its id is of another namespace, or hidden."""
    mark: Words = ""
    """:func:`attempt_mark` of the attempt that it belongs or belonged to; empty: it bears none that can be read."""
    command: Words = ""
    user: Words = ""
    started_at: float | None = None
    """Seconds since the epoch by the node's clock."""


class GpuLook(Message):
    """One look at one node. A GPU that is not among :attr:`gpus` was not seen, whatever else is."""

    node: str = ""
    """Address, as Ray knows it."""
    gpus: tuple[int, ...] = ()
    """Indices of those that Ray was given and that were looked at."""
    processes: tuple[GpuProcess, ...] = ()
    """One entry for each process and GPU."""
    problem: Words = ""
    """Why the node, or some of its GPUs, could not be seen; empty when all of them were."""
