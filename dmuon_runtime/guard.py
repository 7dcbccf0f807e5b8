"""Guarded launches: a kernel that fails costs no step its result, and no rank applies what another one threw away.

Every call of a kernel that has a breaker is watched: an exception and a non-finite result of finite matrices always,
and every so many calls a few matrices of each shape go through the fallback too and the results are compared. So a
kernel that turns wrong without turning non-finite is found out within ``check_every_calls`` calls of a shape, one a
step. The fallback itself (``cublas``) has no breaker.

Note "Devices that run behind". On a CPU everything is known when the call returns. On CUDA only exceptions are; what
the numbers say is written to pinned memory behind the work and read in a later step, once an event has passed, so
that no step waits for the device. Until then a flag on the device withholds the update; see
:func:`guarded_orthogonalize`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmuon_runtime.breaker import (
    Breaker,
    BreakerKey,
    BreakerState,
    Cause,
    Finding,
    Observation,
    Thresholds,
    size_class,
)
from dmuon_runtime.ledger import LEDGER

if TYPE_CHECKING:
    from dmuon_runtime.newton_schulz import NewtonSchulz
    from dmuon_runtime.transport import Transport

__all__ = ["KernelGuard", "Late", "compare", "dtype_name", "guarded_orthogonalize"]

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Run = Callable[[Sequence[Tensor]], list[Tensor]]
"""Orthogonalises tensors [..., m, n] of one group."""


@torch.no_grad()
def compare(matrices: Sequence[Tensor], found: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Return [relative error, excess of the orthogonality error] of ``found`` over ``expected``, the worst of all.

    The difference is weighted by the matrix before, ``||(F - E) X^T|| / ||E X^T||`` with X [m, n], and by the result,
    ``||(F - E) E^T|| / ||E E^T||``; the smaller one counts. Newton-Schulz lifts rounding noise in directions that X
    does not have to full size, and two correct kernels differ there as they like: X gives those no weight. Where X has
    one large singular value, it gives the others none, and 16 bits tell that one's direction to a tenth: E counts all
    that came out. The orthogonality error is the root mean square of ``sigma^2 - 1`` from the Gram matrix of the short
    side, which needs no eigenvalues and so no wait for a device.
    A matrix that was not finite counts as 0; else NaN stays NaN. float32 [2].
    """
    worst = []
    for x, f, e in zip(matrices, found, expected, strict=True):
        dtype = torch.float64 if torch.float64 in (x.dtype, f.dtype, e.dtype) else torch.float32
        x, f, e = (_wide(t, dtype) for t in (x, f, e))
        x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        relative = torch.minimum(_weighted(f - e, e, x), _weighted(f - e, e, e))
        excess = _spread(f) - _spread(e)
        given = x.isfinite().flatten(-2).all(dim=-1)  # what was no number before is not the kernel's fault
        worst.append(torch.stack([torch.where(given, error, 0.0).amax() for error in (relative, excess)]))
    return torch.stack(worst).amax(dim=0).float()


def _weighted(difference: Tensor, expected: Tensor, weight: Tensor) -> Tensor:
    """Return ``||difference W^T|| / ||expected W^T||`` of each matrix [..., m, n]."""
    scale = (expected @ weight.mT).norm(dim=(-2, -1)).clamp_min(1e-30)
    ratio: Tensor = (difference @ weight.mT).norm(dim=(-2, -1)) / scale
    return ratio


def _wide(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the reading of [..., m, n] with no more rows than columns, in ``dtype``."""
    return (t.mT if t.shape[-2] > t.shape[-1] else t).to(dtype)


def _spread(o: Tensor) -> Tensor:
    """Root mean square of ``sigma^2 - 1`` of wide matrices [..., m, n]."""
    gram = o @ o.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    norm: Tensor = torch.linalg.vector_norm(gram, dim=(-2, -1))
    return norm / math.sqrt(o.shape[-2])


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def _non_finite(matrices: Sequence[Tensor], results: Sequence[Tensor]) -> Tensor:
    """Return whether a tensor without NaN and infinity gave one with them: bool [].

    On a CPU a sum of the results, whose elements are about 1 at most, says at less cost that all is well.
    """
    if results[0].device.type == "cpu" and all(math.isfinite(float(r.sum(dtype=torch.float32))) for r in results):
        return torch.zeros((), dtype=torch.bool)
    before, after = (torch.stack(torch._foreach_norm(list(x), float("inf"))).isfinite() for x in (matrices, results))
    return (before & ~after).any()


@dataclass(slots=True)
class Late:
    """Numbers of a call that the device has not come to yet."""

    breaker: Breaker
    host: Tensor
    """Pinned: non-finite, then (of a comparison) relative error and excess."""
    done: torch.Event
    spans: tuple[tuple[torch.Event, torch.Event], ...] = ()
    """Of a comparison: begin and end of the kernel, begin and end of the fallback."""


@dataclass(slots=True)
class KernelGuard:
    """The breakers of a process, and what they have seen. Not for several threads.

    A breaker is made when its kernel is first called, in the state that :attr:`initial` has for the kernel.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    initial: dict[str, BreakerState] = field(default_factory=dict)
    breakers: dict[BreakerKey, Breaker] = field(default_factory=dict)
    fallback_calls: int = 0
    """Calls whose result came from the fallback because the kernel failed in them."""
    fallback_steps: int = 0
    """Steps that all ranks did with the fallback because a kernel failed on one of them."""
    failed: bool = False
    """A call since :meth:`begin` failed, as far as the host knows."""
    findings: list[tuple[BreakerKey, Finding]] = field(default_factory=list)
    """What was wrong, in order; for whoever reports it to take away."""
    flags: list[Tensor] = field(default_factory=list)
    _late: deque[Late] = field(default_factory=deque)
    _warm: set[tuple[BreakerKey, Shapes]] = field(default_factory=set)
    _calls: dict[tuple[BreakerKey, Shape], int] = field(default_factory=dict)
    """Watched calls with matrices of a shape, counted as they are made: a device's own word comes too late for that."""

    def begin(self) -> None:
        """Start a step: take in what the device has come to since."""
        self.failed, self.flags = False, []
        while self._late and self._late[0].done.query():
            late = self._late.popleft()
            bad, *numbers = late.host.tolist()
            slow = None
            if late.spans:
                kernel_s, fallback_s = (first.elapsed_time(last) for first, last in late.spans)
                slow = kernel_s > self.thresholds.slow_factor * fallback_s
            self._observe(late.breaker, _observation(bool(bad), numbers, slow))

    def breaker(self, kernel: str, short_dim: int, dtype: torch.dtype) -> Breaker:
        """Return the breaker of a kernel for matrices of this short side and compute dtype."""
        return self.at(BreakerKey(kernel, size_class(short_dim), dtype_name(dtype)))

    def at(self, key: BreakerKey) -> Breaker:
        """Return the breaker of ``key``, made now if there is none."""
        if key not in self.breakers:
            state = self.initial.get(key.kernel, BreakerState.CLOSED)
            self.breakers[key] = Breaker(key, self.thresholds.of_dtype(key.dtype), state)
        return self.breakers[key]

    def avoids(self, kernel: str, short_dim: int, dtype: torch.dtype) -> bool:
        """True where the fallback's results are to be applied in place of the kernel's."""
        return self.breaker(kernel, short_dim, dtype).state.avoids_kernel

    def run(self, breaker: Breaker, tensors: Sequence[Tensor], kernel: Run, fallback: Run) -> list[Tensor]:
        """Run a call of the kernel; where the host sees it fail, return what the fallback gives.

        From then on, until the breaker moves, the kernel is not called: the step that is being done stays a failed one.
        """
        if breaker.is_suspect:
            self.failed, self.fallback_calls = True, self.fallback_calls + 1
            return fallback(tensors)
        sample, begin = self._due(breaker, tensors), len(self.findings)
        try:
            with LEDGER.trial() as trial:
                results = kernel(tensors)
            bad = _non_finite(tensors, results)
            if bad.device.type == "cpu":
                self._observe(breaker, Observation(non_finite=bool(bad)))
            else:
                self.flags.append(bad)
                self._read_later(breaker, bad.float()[None])
        except Exception as error:  # whatever a kernel raises; an error of the device itself comes again below
            self._observe(breaker, Observation(exception=_say(error)))
        else:
            if sample and len(self.findings) == begin:
                self._compare(breaker, sample, kernel, fallback)
            if not any(finding.cause > Cause.SLOW for _, finding in self.findings[begin:]):
                trial.keep()
                return results
        self.fallback_calls += 1
        return fallback(tensors)

    def probe(self, breaker: Breaker, tensors: Sequence[Tensor], kernel: Run, fallback: Run) -> None:
        """In a trial, run the kernel beside the fallback on a few of the matrices; nothing of it is applied."""
        if breaker.tries_next:
            failed = self.failed
            turn, number = breaker.probes, self.thresholds.check_matrices
            sample = [x for same in _by_shape(tensors).values() for x in _chosen(same, turn, number)]
            self._compare(breaker, sample, kernel, fallback)
            self.failed = failed  # nothing that was applied is wrong

    def _due(self, breaker: Breaker, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Count a call; return the matrices [1, m, n] whose results are compared in it, mostly none.

        Each shape has a count of its own. With one for the breaker, two groups of a size class would share it, and
        where they alternate every second call would always be the same group's.
        """
        sample: list[Tensor] = []
        for shape, same in _by_shape(tensors).items():
            number = self._calls.get((breaker.key, shape), 0)
            if breaker.is_watched:
                self._calls[breaker.key, shape] = number + 1
                turn, rest = divmod(number, self.thresholds.check_every_calls)
                sample += [] if rest else _chosen(same, turn, self.thresholds.check_matrices)
        return sample

    def _compare(self, breaker: Breaker, sample: list[Tensor], kernel: Run, fallback: Run) -> None:
        try:
            with LEDGER.comparing():
                key = (breaker.key, tuple(tuple(x.shape) for x in sample))
                for _ in range(0 if key in self._warm else 2):  # what compiles, or captures a graph, is not slow
                    kernel(sample), fallback(sample)
                self._warm.add(key)
                found, kernel_span = _timed(kernel, sample)
                expected, fallback_span = _timed(fallback, sample)
        except Exception as error:
            self._observe(breaker, Observation(exception=_say(error), compared=True))
            return
        numbers = torch.cat([_non_finite(sample, found).float()[None], compare(sample, found, expected)])
        if not isinstance(kernel_span, float) and not isinstance(fallback_span, float):
            self.flags.append(_out_of_bounds(numbers, breaker.thresholds))
            self._read_later(breaker, numbers, (kernel_span, fallback_span))
        elif isinstance(kernel_span, float) and isinstance(fallback_span, float):
            bad, *values = numbers.tolist()
            slow = kernel_span > self.thresholds.slow_factor * fallback_span
            self._observe(breaker, _observation(bool(bad), values, slow))

    def _observe(self, breaker: Breaker, seen: Observation) -> None:
        finding = breaker.observe(seen)
        if finding is not None:
            self.findings.append((breaker.key, finding))
            self.failed = self.failed or finding.cause > Cause.SLOW

    def _read_later(
        self, breaker: Breaker, numbers: Tensor, spans: tuple[tuple[torch.Event, torch.Event], ...] = ()
    ) -> None:
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        done = torch.Event(numbers.device)
        done.record(torch.cuda.current_stream(numbers.device))
        self._late.append(Late(breaker, host, done, spans))

    def states(self, kernels: Iterable[str]) -> Mapping[BreakerKey, BreakerState]:
        """Return the states of the breakers of some kernels; a thread may ask while a step makes another breaker."""
        wanted = set(kernels)
        return {key: breaker.state for key, breaker in list(self.breakers.items()) if key.kernel in wanted}


def _out_of_bounds(numbers: Tensor, thresholds: Thresholds) -> Tensor:
    limits = numbers.new_tensor([0.0, thresholds.relative_error, thresholds.orthogonality_error])
    return ~(numbers <= limits).all()


def _observation(non_finite: bool, numbers: Sequence[float], slow: bool | None) -> Observation:
    if not numbers:
        return Observation(non_finite=non_finite)
    return Observation(None, non_finite, numbers[0], numbers[1], slow, compared=True)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _by_shape(tensors: Sequence[Tensor]) -> dict[Shape, list[Tensor]]:
    """Return tensors [..., m, n] by (m, n), in their order."""
    found: dict[Shape, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(tuple(x.shape[-2:]), []).append(x)
    return found


def _chosen(same: Sequence[Tensor], turn: int, number: int) -> list[Tensor]:
    """Return up to ``number`` matrices [1, m, n] of tensors [..., m, n], others at each ``turn`` until all were."""
    counts = [math.prod(x.shape[:-2]) for x in same]
    found, total = [], sum(counts)
    for place in range(min(number, total)):
        index, tensor = (turn * number + place) % total, 0
        while index >= counts[tensor]:
            index, tensor = index - counts[tensor], tensor + 1
        matrix = same[tensor].reshape(-1, *same[tensor].shape[-2:])[index]
        found.append(matrix[None])
    return found


def _timed(run: Run, tensors: Sequence[Tensor]) -> tuple[list[Tensor], float | tuple[torch.Event, torch.Event]]:
    """Run with a clock: seconds, or events on CUDA."""
    if tensors[0].device.type != "cuda":
        begin = time.perf_counter()
        results = run(tensors)
        return results, time.perf_counter() - begin
    stream = torch.cuda.current_stream(tensors[0].device)
    first, last = (torch.Event(tensors[0].device, enable_timing=True) for _ in range(2))
    first.record(stream)
    results = run(tensors)
    last.record(stream)
    return results, (first, last)


def guarded_orthogonalize(
    newton_schulz: NewtonSchulz,
    transport: Transport,
    like: Sequence[Tensor],
    load: Callable[[Sequence[int]], list[Tensor]],
    steps: int,
) -> tuple[list[Tensor], Tensor | None]:
    """Orthogonalise on all ranks so that the results of one step are applied together or not at all. Collective.

    What a host knows (on a CPU everything, on CUDA exceptions) is agreed before anything is applied: if a call failed
    on any rank, every rank throws its results away and does them with the fallback. What only a device knows cannot be
    waited for: the sum of flags over ranks comes back as a factor for the update, 0.0 on all ranks where a result of
    any is bad.

    Args:
        like, load: as for :meth:`NewtonSchulz.each_round`; all is loaded once more where a call failed. Of what is
            loaded no more than a round is held here, and all results.

    Returns:
        The results, and None or the factor, float32 [].
    """
    guard = newton_schulz.guard
    assert guard is not None, "there is a guard, on all ranks alike"
    guard.begin()
    with LEDGER.trial() as trial:
        results = newton_schulz.all_rounds(like, load, steps)
    if transport.agree_max([int(guard.failed)])[0]:
        guard.fallback_steps += 1
        del results
        with newton_schulz.falling_back():
            return newton_schulz.all_rounds(like, load, steps), None
    trial.keep()
    if transport.device.type == "cpu":
        return results, None
    bad = torch.stack(guard.flags).any().float() if guard.flags else torch.zeros((), device=transport.device)
    return results, (transport.sum_values(bad[None]) == 0).float()[0]
