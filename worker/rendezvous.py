"""How the ranks of an attempt find each other: a store that rank 0's node serves, on a port the system chose."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["connect_store", "join_group", "leave_group", "serve_store"]


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Serve a store on a free port of this node; ``store.port`` says which. It listens before this returns.

    Args:
        host: address of this node that the other ranks reach.
    """
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """Connect to the store at ``host:port``."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))


def join_group(
    store: Store, rank: int, world_size: int, device: torch.device, *, join_timeout_s: float, timeout_s: float
) -> None:
    """Form the default process group, and wait until every rank has joined it.

    ``device`` becomes the current one, which NCCL and the runtime take. The group is bound to none: of one that is,
    torch 2.11 splits the groups of a mesh off, and crashes where the group has gloo beside NCCL.

    Raises:
        TimeoutError: with the ranks that are missing after ``join_timeout_s``.
    """
    _await_ranks(store, rank, world_size, join_timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _await_ranks(store: Store, rank: int, world_size: int, timeout_s: float) -> None:
    store.set(f"joined/{rank}", "1")
    try:
        store.wait([f"joined/{other}" for other in range(world_size)], timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        missing = [other for other in range(world_size) if not store.check([f"joined/{other}"])]
        raise TimeoutError(
            f"ranks {missing} of {world_size} did not join the process group within {timeout_s:g} s"
        ) from None


def leave_group() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
