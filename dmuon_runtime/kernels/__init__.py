"""Kernels for the symmetric products of Newton-Schulz, by name."""

from dmuon_runtime.kernels import syrk_quack
from dmuon_runtime.kernels._base import KernelUnavailable, SymmetricKernel
from dmuon_runtime.kernels._registry import (
    KERNEL_NAMES,
    KERNELS,
    default_device,
    get_backend_status,
    get_ns_backend,
    kernel_names,
    registered_kernel,
)

__all__ = [
    "KERNELS", "KERNEL_NAMES", "KernelUnavailable", "SymmetricKernel", "default_device", "get_backend_status",
    "get_ns_backend", "kernel_names", "registered_kernel", "syrk_quack",
]  # fmt: skip
