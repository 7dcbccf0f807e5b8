"""NVML as a file says it, for the processes of a test's Ray: one GPU, and ids and bytes of who holds it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from worker import gpus

nvmlMemory_v2 = 2


class NVMLError(Exception):
    """As in the real one."""


class NVMLError_FunctionNotFound(NVMLError):
    """As in the real one."""


class NVMLError_NotSupported(NVMLError):
    """As in the real one."""


def nvmlInit() -> None:
    said = Path(os.environ["FAKE_NVML"]).read_text()
    if said == "hang":
        time.sleep(60)
    if said == "raise":
        raise RuntimeError("no such driver")
    gpus.DEVICES = ("/", "pipe:")  # there is no device to hold open


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}"


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    listed = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in listed]


def nvmlDeviceGetMPSComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    raise NVMLError_NotSupported()


def nvmlDeviceGetGraphicsRunningProcesses(handle: int) -> list[SimpleNamespace]:
    return []


def nvmlDeviceGetMemoryInfo(handle: int, version: int) -> SimpleNamespace:
    return SimpleNamespace(used=0)
