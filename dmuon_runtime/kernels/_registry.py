"""Kernels by name, and which of them runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from dmuon_runtime.kernels._base import KernelUnavailable, SymmetricKernel
from dmuon_runtime.kernels._blocked import Blocked
from dmuon_runtime.kernels._cublas import Cublas
from dmuon_runtime.kernels._cute_sm80 import CuteSm80
from dmuon_runtime.kernels._settings import kernel_from_environment
from dmuon_runtime.kernels.syrk_quack import Quack

__all__ = [
    "AUTO",
    "CUBLAS",
    "KERNELS",
    "KERNEL_NAMES",
    "KernelChoice",
    "active_kernel",
    "check_runs",
    "decide_choice",
    "default_device",
    "get_backend_status",
    "get_ns_backend",
    "kernel_names",
    "registered_kernel",
    "say_what_auto_is",
]  # fmt: skip

_log = logging.getLogger(__name__)

AUTO: Final = "auto"
CUBLAS: Final = Cublas()
KERNELS: Final[dict[str, SymmetricKernel]] = {
    kernel.name: kernel for kernel in (Quack(), CuteSm80(), Blocked(), CUBLAS)
}
KERNEL_NAMES: Final = (AUTO, *KERNELS)
"""Those that come with the runtime."""
_DETECTION_ORDER: Final = ("quack", "cute_sm80")
_warned: set[str] = set()
_said: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Which kernel was asked for, and by whom: ``argument``, ``environment``, ``deterministic`` or ``detection``."""

    name: str
    decided_by: str


def kernel_names() -> tuple[str, ...]:
    """What may be asked for by name now."""
    return (AUTO, *KERNELS)


@contextmanager
def registered_kernel(kernel: SymmetricKernel) -> Iterator[None]:
    """Let ``kernel`` be chosen by its name in this process; it stands in for one of that name until the end.

    For kernels of one's own and for tests: a job spec knows the names that come with the runtime alone.
    """
    before = KERNELS.get(kernel.name)
    KERNELS[kernel.name] = kernel
    try:
        yield
    finally:
        if before is None:
            del KERNELS[kernel.name]
        else:
            KERNELS[kernel.name] = before


def default_device() -> torch.device:
    """The device on which a process with a GPU computes, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def decide_choice(argument: str, environment: str | None, deterministic: bool) -> KernelChoice:
    """Apply the precedence: argument, environment, deterministic, detection.

    Raises:
        ValueError: a name that is no kernel.
    """
    for name, source in ((argument, "kernel"), (environment or AUTO, "DMUON_NS_KERNEL")):
        if name not in kernel_names():
            raise ValueError(f"{source}={name!r} is no Newton-Schulz kernel; there are {', '.join(kernel_names())}")
    if argument != AUTO:
        return KernelChoice(argument, "argument")
    if environment is not None and environment != AUTO:
        return KernelChoice(environment, "environment")
    if deterministic:
        return KernelChoice(CUBLAS.name, "deterministic")
    return KernelChoice(AUTO, "detection")


def active_kernel(choice: KernelChoice, device: torch.device) -> SymmetricKernel:
    """Return what runs now on ``device``.

    ``auto`` goes down the ladder to what fits. A named kernel that was switched off gives way to ``cublas``. Where a
    kernel is passed over that was named, or that is meant for such a device, its reason is logged once.
    """
    if choice.name == AUTO:
        for kernel in (KERNELS[name] for name in _DETECTION_ORDER):
            if kernel.fits(device):
                return kernel
            if kernel.is_meant_for(device):
                _say_passed_over(kernel, device)
        return CUBLAS
    kernel = KERNELS[choice.name]
    if kernel.available(device)[0]:
        return kernel
    _say_passed_over(kernel, device)
    return CUBLAS


def _say_passed_over(kernel: SymmetricKernel, device: torch.device) -> None:
    detail = kernel.available(device)[1]
    if detail not in _warned:
        _warned.add(detail)
        _log.warning("Newton-Schulz runs on cublas instead of %s: %s", kernel.name, detail)


def check_runs(choice: KernelChoice, device: torch.device) -> None:
    """Raise :class:`KernelUnavailable` when a kernel that was asked for by name cannot run on ``device``."""
    if choice.name == AUTO:
        return
    ok, detail = KERNELS[choice.name].available(device)
    if not ok:
        raise KernelUnavailable(
            choice.name, f"{detail} (asked for by {choice.decided_by}); auto takes the best that runs here"
        )


def say_what_auto_is(name: str, device: torch.device) -> None:
    """Log, once for each device, which kernel ``auto`` comes to."""
    if name == AUTO and (name, str(device)) not in _said:
        _said.add((name, str(device)))
        kernel = active_kernel(decide_choice(AUTO, None, False), device)
        _log.info("Newton-Schulz: auto is %s on %s (%s)", kernel.name, device, kernel.available(device)[1])


def _auto_choice(device: torch.device) -> tuple[str | None, str]:
    """Return the kernel that ``auto`` comes to, and why; None and the error where ``NewtonSchulz()`` raises it."""
    choice = decide_choice(AUTO, kernel_from_environment(), False)
    try:
        check_runs(choice, device)
    except KernelUnavailable as error:
        return None, str(error)
    kernel = active_kernel(choice, device)
    return kernel.name, kernel.available(device)[1]


def _sm_version(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def get_backend_status() -> dict[str, int | str | bool | None]:
    """Say what this machine has: ``auto_choice`` is what ``kernel="auto"`` would launch now.

    It is None where that raises, since ``DMUON_NS_KERNEL`` names a kernel that cannot run here; then ``auto_error``
    says why.

    Raises:
        ValueError: ``DMUON_NS_KERNEL`` is no kernel's name.
    """
    device = default_device()
    name, detail = _auto_choice(device)
    return {
        "sm_version": _sm_version(device),
        "auto_choice": name,
        "quack_available": KERNELS["quack"].available(device)[0],
        "cute_sm80_available": KERNELS["cute_sm80"].available(device)[0],
        "cublas_always_available": True,
        **({} if name is not None else {"auto_error": detail}),
    }


def get_ns_backend() -> str:
    """One line for a start-up log: what ``NewtonSchulz()`` would launch now, or that it raises and why.

    Raises:
        ValueError: ``DMUON_NS_KERNEL`` is no kernel's name.
    """
    device = default_device()
    (name, detail), version = _auto_choice(device), _sm_version(device)
    place = "CPU" if version is None else f"SM{version}"
    if name is None:
        return f"Gram NS · no kernel ({place}): NewtonSchulz() fails: {detail}"
    return f"Gram NS · kernel={name} ({place}, {detail})"
