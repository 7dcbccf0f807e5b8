"""From the spec and a kernel policy to the Newton-Schulz that runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_runtime.breaker import BreakerState, Move, Observation, Thresholds, Transition, decide_finding
from dmuon_runtime.coefficients import (
    KELLER_JORDAN_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    Triple,
)
from dmuon_runtime.guard import KernelGuard, compare
from dmuon_runtime.kernels import KERNELS
from dmuon_runtime.ledger import LEDGER, NsCount
from dmuon_runtime.matrices import matrix_shapes
from dmuon_runtime.newton_schulz import Choices, NewtonSchulz
from dmuon_runtime.orthogonality import orthogonality_bound
from dmuon_runtime.plan import RuntimePlan
from dmuon_runtime.policy import DTYPE_NAMES
from worker.contract.kernels import (
    FALLBACK_KERNEL,
    CoefficientSet,
    Kernel,
    KernelAvailability,
    KernelPolicy,
    KernelTarget,
)
from worker.contract.messages import Milestone
from worker.contract.spec import KernelsSpec

__all__ = [
    "KernelSwitch", "NsCalls", "SampledNewtonSchulz", "applied", "check_numerics", "decide_kernel",
    "kernel_availability", "launched", "launched_kernel", "make_newton_schulz", "ns_calls", "with_target",
]  # fmt: skip

_log = logging.getLogger(__name__)

_SETS: Mapping[CoefficientSet, Sequence[Triple]] = {
    CoefficientSet.POLAR_EXPRESS: POLAR_EXPRESS_COEFFICIENTS,
    CoefficientSet.YOU: YOU_COEFFICIENTS,
    CoefficientSet.KELLER_JORDAN: KELLER_JORDAN_COEFFICIENTS,
}
_MAX_CHECKED = 4
"""Matrices, the smallest of different sizes, with which a kernel is checked before it is swapped in."""


class SampledNewtonSchulz(NewtonSchulz):
    """Newton-Schulz that measures, now and then, how orthogonal a result is."""

    sample_next = False
    sampled: Tensor | float | None = None
    """What was measured last, where it was measured; read it by :attr:`last_error`."""

    @property
    def last_error(self) -> float | None:
        """What was measured last; waits for the device when it is new."""
        self.sampled = None if self.sampled is None else float(self.sampled)
        return self.sampled

    def each_round(
        self, like: Sequence[Tensor], load: Callable[[Sequence[int]], list[Tensor]], steps: int = 5
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """As in the base class; after ``sample_next`` was set, the result for the smallest matrix is measured once."""
        chosen = None
        if self.sample_next and like:
            self.sample_next = False
            chosen = min(range(len(like)), key=lambda index: (min(like[index].shape[-2:]), like[index].numel()))
        for indices, results in super().each_round(like, load, steps):
            if chosen in indices:
                smallest = results[indices.index(chosen)]
                self.sampled = orthogonality_bound(smallest.reshape(-1, *smallest.shape[-2:])[0])
            yield indices, results


def make_newton_schulz(spec: KernelsSpec, kernel: Kernel) -> SampledNewtonSchulz:
    """Return the Newton-Schulz of ``spec`` with ``kernel`` in place of the spec's.

    Raises:
        ValueError: unusable coefficients or restarts, or a kernel that cannot run here.
    """
    named = spec.coefficients
    coefficients = _SETS[named] if isinstance(named, CoefficientSet) else named
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


def applied(
    before: Mapping[tuple[str, str], NsCount], after: Mapping[tuple[str, str], NsCount]
) -> dict[tuple[str, str], int]:
    """Return the matrices by (kernel, algorithm) whose results were applied between two snapshots of the ledger."""
    more = {key: count.matrices - before.get(key, NsCount()).matrices for key, count in after.items()}
    return {key: number for key, number in more.items() if number}


def launched(
    before: Mapping[tuple[str, str], NsCount], after: Mapping[tuple[str, str], NsCount]
) -> frozenset[tuple[str, str]]:
    """Return the (kernel, algorithm) that launched something between two snapshots, comparisons left out."""
    return frozenset(key for key, count in after.items() if count.launches > before.get(key, NsCount()).launches)


def launched_kernel(before: Mapping[tuple[str, str], NsCount], after: Mapping[tuple[str, str], NsCount]) -> str | None:
    """Return the kernel with most applied matrices, of those that launched something between two snapshots; else None.

    Launches alone do not say it: where a kernel failed, both it and the fallback were launched.
    """
    ran = launched(before, after)
    matrices = dict.fromkeys(sorted(kernel for kernel, _ in ran), 0)
    for (kernel, _), number in applied(before, after).items():
        if kernel in matrices:
            matrices[kernel] += number
    return max(matrices, key=lambda name: matrices[name], default=None)


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
    """Holds the Newton-Schulz of a job, and replaces it when a policy, a breaker or a swap says so.

    ``epoch`` counts what ran: it grows with each change, and is never below the epoch of the policy that holds.
    """

    def __init__(self, spec: KernelsSpec, device: torch.device, policy: KernelPolicy) -> None:
        self.spec, self.device, self.policy = with_target(spec, policy.target), device, policy
        self.guard = KernelGuard(Thresholds(**spec.breaker.model_dump()))
        self.moved: list[Transition] = []
        """What an operator's word did to breakers that had moved by themselves; for whoever tells it to take away."""
        self._obey_operator(KernelPolicy(), policy)
        self.epoch = policy.epoch
        self._prepared: tuple[NsCalls, int, Choices] | None = None
        self._before: KernelsSpec | None = None
        self.newton_schulz = self._make(self.spec, policy)

    @property
    def kernel(self) -> str:
        """What would be launched now."""
        return self.newton_schulz.kernel_on(self.device)

    def measure(self, calls: NsCalls, progress: Callable[[str], None]) -> Choices:
        """Measure, on this rank, what is fastest for the calls of all ranks."""
        return self.newton_schulz.measure(calls.shapes, calls.dtype, self.device, progress, calls.steps)

    def prepare(self, calls: NsCalls, rank: int, choices: Choices) -> None:
        """Take over what one rank measured, and compile all that the calls of ``rank`` need, now and after a switch."""
        self._prepared = (calls, rank, choices)
        self._compile(self.newton_schulz)

    def _compile(self, newton_schulz: NewtonSchulz) -> None:
        if self._prepared is None:
            return
        calls, rank, choices = self._prepared
        newton_schulz.adopt(choices)
        newton_schulz.prepare(calls.shapes[rank], calls.dtype, self.device, _log.info, calls.steps)

    def apply(self, policy: KernelPolicy, step: int) -> Milestone | None:
        """Take over ``policy``; return what changed, or None when it says nothing new about breakers.

        Args:
            step: the step that runs next, counted from 1.
        """
        before, self.policy = self.policy, policy
        if policy.epoch == before.epoch or policy.same_breakers(before):
            return None
        self._obey_operator(before, policy)
        previous = self.kernel
        self._use(self.spec, self._make(self.spec, policy))
        self._compile(self.newton_schulz)
        self.epoch = max(self.epoch + 1, policy.epoch)
        tripped = ", ".join(sorted(policy.tripped)) or "none"
        return self.changed(step, previous, f"tripped: {tripped}")

    def changed(self, step: int, previous: str, why: str) -> Milestone:
        """Return the milestone of a change that begins with ``step``."""
        return Milestone(
            name="kernel_changed",
            at=time.time(),
            message=f"epoch {self.epoch}: {previous} -> {self.kernel} from step {step} on; {why}",
            data={"epoch": self.epoch, "step": step, "kernel": self.kernel, "previous": previous},
        )

    def build(self, target: KernelTarget) -> tuple[KernelsSpec, SampledNewtonSchulz]:
        """Make what a swap to ``target`` would use, without using it. Safe beside a running step.

        Raises:
            ValueError: it cannot run here.
        """
        spec = with_target(self.spec, target)
        return spec, self._make(spec, self.policy)

    def swap_in(self, spec: KernelsSpec, number: int) -> None:
        """Run what ``spec`` says from the next step on, in a new epoch; the old one is held for the way back."""
        self._before = self.spec
        self._use(spec, self._make(spec, self.policy))
        self.epoch = max(self.epoch + 1, number)

    def swap_back(self) -> None:
        """Run again what ran before the swap, in a new epoch."""
        assert self._before is not None, "nothing was swapped in"
        self._use(self._before, self._make(self._before, self.policy))
        self._before = None
        self.epoch += 1

    def keep(self) -> None:
        """Let go of what ran before the swap."""
        self._before = None

    def tripped(self) -> None:
        """A breaker moved: what is launched changes, in a new epoch."""
        self.newton_schulz.drop_graphs()
        self.epoch += 1

    def _use(self, spec: KernelsSpec, newton_schulz: SampledNewtonSchulz) -> None:
        newton_schulz.sampled = self.newton_schulz.sampled
        self.newton_schulz.drop_graphs()
        self.spec, self.newton_schulz = spec, newton_schulz

    def _obey_operator(self, before: KernelPolicy, policy: KernelPolicy) -> None:
        now, guard = time.monotonic(), self.guard
        for kernel in Kernel:
            move, state = _pinned(kernel, policy)
            is_reset = policy.resets.get(kernel, 0) > before.resets.get(kernel, 0)
            if is_reset or (move, state) != _pinned(kernel, before):
                guard.initial[kernel.value] = state
                for key, breaker in guard.breakers.items():
                    if key.kernel == kernel.value:
                        done = breaker.move(move, now, "an operator's word")
                        if done is not None and done.before in (BreakerState.OPEN, BreakerState.HALF_OPEN):
                            self.moved.append(done)

    def _make(self, spec: KernelsSpec, policy: KernelPolicy) -> SampledNewtonSchulz:
        detected = Kernel(make_newton_schulz(spec, Kernel.AUTO).kernel_on(self.device))
        made = make_newton_schulz(spec, decide_kernel(spec.kernel, detected, policy))
        made.guard = self.guard
        if self._prepared is not None:
            made.adopt(self._prepared[2])
        return made


def _pinned(kernel: Kernel, policy: KernelPolicy) -> tuple[Move, BreakerState]:
    if kernel in policy.tripped:
        return Move.FORCE_OPEN, BreakerState.FORCED_OPEN
    if kernel in policy.disabled:
        return Move.DISABLE, BreakerState.DISABLED
    if kernel in policy.metrics_only:
        return Move.OBSERVE, BreakerState.METRICS_ONLY
    return Move.RESET, BreakerState.CLOSED


def with_target(spec: KernelsSpec, target: KernelTarget | None) -> KernelsSpec:
    """Return ``spec`` with what ``target`` says in its place."""
    return spec if target is None else spec.model_copy(update=_fields(target))


def _fields(target: KernelTarget) -> dict[str, object]:
    return {name: value for name in KernelTarget.model_fields if (value := getattr(target, name)) is not None}


def check_numerics(
    newton_schulz: NewtonSchulz, calls: NsCalls, rank: int, device: torch.device, thresholds: Thresholds
) -> str | None:
    """Compare with the same iteration in float64 on a few random matrices of the sizes that ``rank`` has.

    Returns:
        What is wrong, or None. Launches are counted nowhere.
    """
    sizes = sorted({shape[-2:] for shape in calls.shapes[rank]}, key=lambda size: size[0] * size[1])[:_MAX_CHECKED]
    generator = torch.Generator().manual_seed(0)
    with LEDGER.muted():
        for size in sizes:
            x = torch.randn(1, *size, generator=generator, dtype=torch.float64)
            given = x.to(device, calls.dtype)
            reference = NewtonSchulz(
                newton_schulz.backend, "cublas", newton_schulz.coefficients, newton_schulz.restart_iterations
            )
            expected = reference.orthogonalize([given.double()], calls.steps)
            found = newton_schulz.orthogonalize([given], calls.steps)
            relative, excess = compare([given], found, expected).tolist()
            wrong = decide_finding(thresholds, Observation(relative_error=relative, orthogonality_excess=excess))
            if wrong is not None:
                return f"on a random {size[0]} x {size[1]} matrix {wrong.detail}"
    return None


def kernel_availability(device: torch.device) -> tuple[KernelAvailability, ...]:
    """Say for each kernel whether ``device`` can run it."""
    result = [KernelAvailability(kernel=Kernel.AUTO, available=True, detail="takes the best that is available")]
    for name, kernel in KERNELS.items():
        available, detail = kernel.available(device)
        result.append(KernelAvailability(kernel=Kernel(name), available=available, detail=detail))
    return tuple(result)
