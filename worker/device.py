"""Where a rank computes, and how many threads it may use."""

from __future__ import annotations

from pathlib import Path

import torch

from worker.contract.spec import JobSpec

__all__ = ["decide_device", "gpu_model", "limit_threads"]

_DRIVER = Path("/proc/driver/nvidia/gpus")


def decide_device(spec: JobSpec, local_index: int) -> torch.device:
    """Return the CPU, or the GPU of a spec that asks for one.

    Args:
        local_index: which of the GPUs that this process sees.

    Raises:
        RuntimeError: GPUs are asked for and this process sees none, or none is left for this index.
    """
    if spec.resources.gpus_per_worker <= 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"the job asks for {spec.resources.gpus_per_worker:g} GPUs a worker, but this process sees none; set "
            "/resources/gpus_per_worker to 0, or install torch for CUDA on the workers"
        )
    number = torch.cuda.device_count()
    if local_index >= number and spec.resources.gpus_per_worker >= 1:
        raise RuntimeError(
            f"each worker asks for a GPU of its own, but this machine has {number} and this is worker {local_index}, "
            "counted from 0; lower /mesh, or set /resources/gpus_per_worker below 1 to share one"
        )
    return torch.device("cuda", local_index % number)


def gpu_model(driver: Path = _DRIVER) -> str | None:
    """Return what the driver calls this machine's first GPU, or None; asked so, no context takes memory on it."""
    for file in sorted(driver.glob("*/information")):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip()
    return None


def limit_threads(spec: JobSpec) -> None:
    """Give torch as many CPU threads as the worker has CPUs, at least one."""
    torch.set_num_threads(max(1, int(spec.resources.cpus_per_worker)))
