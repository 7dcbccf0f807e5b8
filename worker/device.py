"""Where a rank computes, and how many threads it may use."""

from __future__ import annotations

import torch

from worker.contract.spec import JobSpec

__all__ = ["decide_device", "limit_threads"]


def decide_device(spec: JobSpec, local_index: int) -> torch.device:
    """Return the CPU, or the GPU of a spec that asks for one.

    Args:
        local_index: which of the GPUs that this process sees.

    Raises:
        RuntimeError: GPUs are asked for and this process sees none.
    """
    if spec.resources.gpus_per_worker <= 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"the job asks for {spec.resources.gpus_per_worker:g} GPUs a worker, but this process sees none; set "
            "/resources/gpus_per_worker to 0, or install torch for CUDA on the workers"
        )
    return torch.device("cuda", local_index % torch.cuda.device_count())


def limit_threads(spec: JobSpec) -> None:
    """Give torch as many CPU threads as the worker has CPUs, at least one."""
    torch.set_num_threads(max(1, int(spec.resources.cpus_per_worker)))
