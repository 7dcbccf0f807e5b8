"""From the spec and a kernel policy to the Newton-Schulz that runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_runtime.coefficients import (
    KELLER_JORDAN_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    Triple,
)
from dmuon_runtime.kernels import KERNELS
from dmuon_runtime.ledger import NsCount
from dmuon_runtime.matrices import matrix_shapes
from dmuon_runtime.newton_schulz import Choices, NewtonSchulz, orthogonality_error
from dmuon_runtime.plan import RuntimePlan
from dmuon_runtime.policy import DTYPE_NAMES
from worker.contract.kernels import FALLBACK_KERNEL, Kernel, KernelAvailability, KernelPolicy
from worker.contract.messages import Milestone
from worker.contract.spec import KernelsSpec

__all__ = [
    "KernelSwitch", "NsCalls", "SampledNewtonSchulz", "decide_kernel", "kernel_availability", "launched_kernel",
    "make_newton_schulz", "ns_calls",
]  # fmt: skip

_log = logging.getLogger(__name__)

_SETS: Mapping[str, Sequence[Triple]] = {
    "polar_express": POLAR_EXPRESS_COEFFICIENTS,
    "you": YOU_COEFFICIENTS,
    "keller_jordan": KELLER_JORDAN_COEFFICIENTS,
}


class SampledNewtonSchulz(NewtonSchulz):
    """Newton-Schulz that measures, now and then, how orthogonal a result is."""

    sample_next = False
    last_error: float | None = None

    def orthogonalize(self, matrices: Sequence[Tensor], steps: int = 5) -> list[Tensor]:
        """As in the base class; after ``sample_next`` was set, the smallest result is measured once."""
        results = super().orthogonalize(matrices, steps)
        if self.sample_next and results:
            self.sample_next = False
            smallest = min(results, key=lambda result: (min(result.shape[-2:]), result.numel()))
            self.last_error = float(orthogonality_error(smallest.reshape(-1, *smallest.shape[-2:])[0]))
        return results


def make_newton_schulz(spec: KernelsSpec, kernel: Kernel) -> SampledNewtonSchulz:
    """Return the Newton-Schulz of ``spec`` with ``kernel`` in place of the spec's.

    Raises:
        ValueError: unusable coefficients or restarts, or a kernel that cannot run here.
    """
    coefficients = _SETS[spec.coefficients] if isinstance(spec.coefficients, str) else spec.coefficients
    return SampledNewtonSchulz(spec.algorithm.value, kernel.value, coefficients, spec.restarts)


def decide_kernel(configured: Kernel, detected: Kernel, policy: KernelPolicy) -> Kernel:
    """Return the kernel to construct with: the configured one, or the fallback where that has tripped.

    Args:
        configured: what the spec asks for.
        detected: what ``auto`` comes to on this rank.
        policy: of the step.
    """
    effective = detected if configured == Kernel.AUTO else configured
    return FALLBACK_KERNEL if effective in policy.tripped else configured


def launched_kernel(before: Mapping[tuple[str, str], NsCount], after: Mapping[tuple[str, str], NsCount]) -> str | None:
    """Return the kernel with most launches between two snapshots of the ledger; None when nothing was launched."""
    launches: dict[str, int] = {}
    for key, count in after.items():
        done = count.launches - before.get(key, NsCount()).launches
        launches[key[0]] = launches.get(key[0], 0) + done
    kernel = max(launches, key=lambda name: launches[name], default=None)
    return kernel if kernel is not None and launches[kernel] > 0 else None


@dataclass(frozen=True, slots=True)
class NsCalls:
    """The Newton-Schulz calls of a step: the shapes [..., m, n] of each rank's, their dtype and number of steps."""

    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    dtype: torch.dtype
    steps: int


def ns_calls(plan: RuntimePlan, ns_steps: int, world_size: int) -> NsCalls:
    """Return what each rank will orthogonalise in a step in which every parameter has a gradient."""
    entries = [entry for entry in plan.parameters if entry.route == "muon"]
    shapes = tuple(
        tuple(
            (matrix.count, matrix.rows, matrix.columns)
            for entry in entries
            if entry.owner == rank
            for matrix in matrix_shapes(entry.shape, entry.matrix_view, entry.split_rows)
        )
        for rank in range(world_size)
    )
    dtypes = {DTYPE_NAMES[entry.optim_dtype] for entry in entries}  # of the reduced gradient and of the momentum
    return NsCalls(shapes, dtypes.pop() if len(dtypes) == 1 else torch.float32, ns_steps)


class KernelSwitch:
    """Holds the Newton-Schulz of a job, and replaces it when a policy with a new epoch arrives."""

    def __init__(self, spec: KernelsSpec, device: torch.device, policy: KernelPolicy) -> None:
        self._spec, self._device = spec, device
        self.epoch = policy.epoch
        self.newton_schulz = self._make(policy)
        self._prepared: tuple[NsCalls, int, Choices] | None = None

    @property
    def kernel(self) -> str:
        """What would be launched now."""
        return self.newton_schulz.kernel_on(self._device)

    def measure(self, calls: NsCalls, progress: Callable[[str], None]) -> Choices:
        """Measure, on this rank, what is fastest for the calls of all ranks."""
        return self.newton_schulz.measure(calls.shapes, calls.dtype, self._device, progress, calls.steps)

    def prepare(self, calls: NsCalls, rank: int, choices: Choices) -> None:
        """Take over what one rank measured, and compile all that the calls of ``rank`` need, now and after a switch."""
        self._prepared = (calls, rank, choices)
        self._compile(self.newton_schulz)

    def _compile(self, newton_schulz: NewtonSchulz) -> None:
        if self._prepared is None:
            return
        calls, rank, choices = self._prepared
        newton_schulz.adopt(choices)
        newton_schulz.prepare(calls.shapes[rank], calls.dtype, self._device, _log.info, calls.steps)

    def apply(self, policy: KernelPolicy, step: int) -> Milestone | None:
        """Take over ``policy``; return what changed, or None when its epoch is the present one.

        Args:
            step: the step that runs next, counted from 1.
        """
        if policy.epoch == self.epoch:
            return None
        before, self.epoch = self.kernel, policy.epoch
        last_error = self.newton_schulz.last_error
        self.newton_schulz = self._make(policy)
        self._compile(self.newton_schulz)
        self.newton_schulz.last_error = last_error
        tripped = ", ".join(sorted(policy.tripped)) or "none"
        return Milestone(
            name="kernel_changed",
            at=time.time(),
            message=f"epoch {policy.epoch}: {before} -> {self.kernel} from step {step} on; tripped: {tripped}",
            data={"epoch": policy.epoch, "step": step, "kernel": self.kernel, "previous": before},
        )

    def _make(self, policy: KernelPolicy) -> SampledNewtonSchulz:
        detected = Kernel(make_newton_schulz(self._spec, Kernel.AUTO).kernel_on(self._device))
        return make_newton_schulz(self._spec, decide_kernel(self._spec.kernel, detected, policy))


def kernel_availability(device: torch.device) -> tuple[KernelAvailability, ...]:
    """Say for each kernel whether ``device`` can run it."""
    result = [KernelAvailability(kernel=Kernel.AUTO, available=True, detail="takes the best that is available")]
    for name, kernel in KERNELS.items():
        available, detail = kernel.available(device)
        result.append(KernelAvailability(kernel=Kernel(name), available=available, detail=detail))
    return tuple(result)
