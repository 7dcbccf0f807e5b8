"""Settings of a worker process: all that is not in the job spec. The only module here that touches the environment."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ATTEMPT_VARIABLE", "WorkerSettings", "hand_on_mark", "prepare_for_gpu", "read_settings", "visible_gpus"]

ATTEMPT_VARIABLE = "DMUON_ATTEMPT"
"""What a rank tells the programs that it starts: whose they are. Read by whoever looks at a GPU's processes."""


def _default_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"dmuon-{os.getuid()}"


def _default_data() -> Path:
    return Path.home() / ".local" / "share" / "dmuon"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What one worker process is told by its machine."""

    cache_directory: Path = field(default_factory=_default_cache)
    """Where tokenized text is kept between runs; ``DMUON_CACHE_DIR``."""
    data_directory: Path = field(default_factory=_default_data)
    """Where checkpoints go when neither spec nor control plane names a place; ``DMUON_DATA_DIR``."""
    join_timeout_s: float = 120.0
    """How long a rank waits for the others to join the process group."""
    collective_timeout_s: float = 600.0
    """How long one collective may take before the process group gives up."""
    report_queue_limit: int = 4096
    """Reports of a rank that wait to be sent; more are dropped, oldest first, and counted."""
    orthogonality_every_steps: int = 25
    """Steps between two samples of the orthogonality of an update."""
    prepare_kernels: bool = True
    """On a GPU, measure and compile Newton-Schulz before the first step; ``DMUON_PREPARE_KERNELS=0``: in it."""


def read_settings() -> WorkerSettings:
    """Read the environment. Call it once, where a process starts."""
    cache, data = os.environ.get("DMUON_CACHE_DIR"), os.environ.get("DMUON_DATA_DIR")
    return WorkerSettings(
        cache_directory=Path(cache) if cache else _default_cache(),
        data_directory=Path(data) if data else _default_data(),
        prepare_kernels=os.environ.get("DMUON_PREPARE_KERNELS") != "0",
    )


def prepare_for_gpu(rank: int, *, shares_it: bool) -> None:
    """Set what CUDA and NCCL read from the environment; call it before either is used. An operator's own values stay.

    CUDA gets 32 queues instead of 8: compute, every communicator and whatever measures one have streams of their own,
    and a stream that waits holds up all others of its queue. NCCL refuses two ranks on one device of one host, so each
    that shares a GPU calls itself a host of its own, and they talk over the network interface.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if shares_it:
        os.environ.setdefault("NCCL_HOSTID", f"rank-{rank}")


def hand_on_mark(mark: str) -> None:
    """Let every program that this process starts bear ``mark`` in its environment."""
    os.environ[ATTEMPT_VARIABLE] = mark


def visible_gpus() -> tuple[str, ...]:
    """Return the indices or UUIDs that this process was restricted to; empty: no restriction."""
    return tuple(part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip())
