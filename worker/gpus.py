"""Which processes hold the GPUs of this node, by NVML and ``/proc``. Needs no torch, and nothing before it is asked.

NVML names processes by their ids on the host. Newer drivers translate them for a container, older ones do not, and
what is outside of it is left out or cannot be looked up. Such a process is told as not found, never as nobody's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psutil

from worker.contract.gpus import GpuLook, GpuProcess
from worker.marks import mark_of, open_files
from worker.settings import visible_gpus

__all__ = ["answer", "look_at_gpus", "promised_gpus"]

T = TypeVar("T")
DEVICES = ("/dev/nvidia", "/dev/dxg")
"""What a process on a GPU holds open begins with one of these: one that does not is another process of that id."""
_MPS = "nvidia-cuda-mps"
"""Server and control of CUDA's multi-process service hold contexts for their clients, who are listed themselves."""
_LEAST_BYTES = 128 << 20
"""In use on a GPU: less is the driver's own, whoever trains takes more."""
_LONGEST_COMMAND = 300


def answer(number: str) -> str:
    """Look at the GPUs of this node, of which Ray has ``number``; return a :class:`GpuLook` as JSON."""
    return look_at_gpus(float(number), visible_gpus()).model_dump_json()


def look_at_gpus(number: float, visible: Sequence[str] = ()) -> GpuLook:
    """Return who holds the GPUs that jobs may get: ``number`` of them, those of ``visible`` where there is a choice.

    A machine without NVML or without its Python package is no error, but a look that saw nothing and says why.
    """
    try:
        import pynvml
    except ImportError:
        return GpuLook(problem="nvidia-ml-py is not installed there; run: pip install 'dmuon-service[worker]'")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuLook(problem=f"NVML cannot be used there ({error}); is the driver loaded, is the node a container?")
    try:
        return _look(pynvml, number, visible)
    except pynvml.NVMLError as error:
        return GpuLook(problem=f"NVML failed there: {error}")
    finally:
        pynvml.nvmlShutdown()


def promised_gpus(uuids: Sequence[str], number: float, visible: Sequence[str]) -> list[int]:
    """Return the indices of the GPUs that Ray was given; ``uuids`` are those of all, by index.

    Given fewer than there are, Ray takes those that its process was restricted to, else the first.
    """
    if number >= len(uuids) or not visible:
        return list(range(len(uuids)))[: math.ceil(number)]
    return [
        index for index, uuid in enumerate(uuids)
        if any(uuid.startswith(name) if name.startswith("GPU-") else name == str(index) for name in visible)
    ]  # fmt: skip


def _look(nvml: Any, number: float, visible: Sequence[str]) -> GpuLook:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    seen: list[int] = []
    processes: list[GpuProcess] = []
    problems: list[str] = []
    for index in promised_gpus(uuids, number, visible):
        try:
            processes += _holders(nvml, handles[index], index, uuids[index])
        except nvml.NVMLError as error:  # lost, or split (MIG) and not for everybody to see
            problems.append(f"GPU {index} does not say who holds it: {error}")
        else:
            seen.append(index)
    if not seen and not problems:
        problems.append(f"Ray has {number:g} GPUs there, NVML sees {len(uuids)}, and none of them is Ray's")
    return GpuLook(gpus=tuple(seen), processes=tuple(processes), problem="; ".join(problems))


def _holders(nvml: Any, handle: Any, index: int, uuid: str) -> list[GpuProcess]:
    listed = {entry.pid: entry for entry in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    with contextlib.suppress(nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported):  # no MPS, no clients of it
        listed |= {entry.pid: entry for entry in nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)}
    if not listed and (used := _unlisted_bytes(nvml, handle)) >= _LEAST_BYTES:
        return [GpuProcess(pid=0, gpu=index, uuid=uuid, bytes=used, found=False)]
    described = [_describe(entry.pid, index, uuid, entry.usedGpuMemory) for entry in listed.values()]
    return [process for process in described if process is not None]


def _unlisted_bytes(nvml: Any, handle: Any) -> int:
    """Return the memory in use on a GPU where nobody computes; 0 where a screen has it or the driver does not say."""
    try:
        if nvml.nvmlDeviceGetGraphicsRunningProcesses(handle):
            return 0
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported):
        return 0


def _describe(pid: int, index: int, uuid: str, num_bytes: int | None) -> GpuProcess | None:
    """Return a process with what the system lets us see of it; None for MPS itself."""
    unknown = GpuProcess(pid=pid, gpu=index, uuid=uuid, bytes=num_bytes, found=False)
    try:
        process = psutil.Process(pid)
        if process.name().startswith(_MPS):
            return None
        opened = open_files(pid)
        if opened is not None and not any(link.startswith(DEVICES) for link in opened):
            return unknown
        command = " ".join(" ".join(_seen(process.cmdline, [])).split()) or process.name()
        return GpuProcess(
            pid=pid, gpu=index, uuid=uuid, bytes=num_bytes, mark=mark_of(process, opened or ()),
            command=command[:_LONGEST_COMMAND], user=_seen(process.username, ""),
            started_at=_seen(process.create_time, None),
        )  # fmt: skip
    except psutil.NoSuchProcess:  # of another namespace, hidden, or gone since it was listed
        return unknown


def _seen(ask: Callable[[], T], otherwise: T) -> T:
    try:
        return ask()
    except psutil.AccessDenied:
        return otherwise
