"""Everything that may change what Newton-Schulz launches in a running job: policies, breakers, swaps.

Called at the beginning and at the end of each step on every rank. What it decides at the beginning depends on words
that all ranks heard alike (:mod:`worker.control`) and on what was decided so before, never on what one rank knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from dmuon_runtime import ledger
from dmuon_runtime._ns_groups import compute_dtype
from dmuon_runtime.breaker import Breaker, BreakerKey, BreakerState, Cause, Finding, Move, Transition, size_class
from dmuon_runtime.guard import dtype_name
from worker.contract.kernels import FALLBACK_KERNEL, Kernel, SwapOrder
from worker.contract.messages import Milestone
from worker.contract.spec import KernelsSpec
from worker.control import Directive
from worker.kernels import KernelSwitch, NsCalls, SampledNewtonSchulz, applied, check_numerics, launched
from worker.swap import Swap, SwapEvent, SwapPhase

__all__ = ["KernelControl"]

_KERNELS: Final = tuple(Kernel)
_RANKS: Final = 1 << 20
_NUM_SWAP_WORDS: Final = 5
_WORDS_A_CLASS: Final = 3
Counts = Mapping[tuple[str, str], ledger.NsCount]


class KernelControl:
    """One rank's voice in what the kernels do, and its obedience to what all ranks came to.

    Of each size class of matrices that the job has, on any rank, the voice has three words: why this rank wants the
    breaker open; whether a trial is due (rank 0 keeps the time); whether this rank's part of a trial is unfinished.
    """

    def __init__(
        self, rank: int, switch: KernelSwitch, calls: NsCalls, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank, self._switch, self._calls, self._clock = rank, switch, calls, clock
        self._dtype = dtype_name(compute_dtype(calls.dtype, switch.device))
        own, every = (
            {size_class(min(s[-2:])) for s in shapes} for shapes in (calls.shapes[rank], sum(calls.shapes, ()))
        )
        self._own, self._classes = own, sorted(every)
        self._swap = Swap(rank, self._prepare, clock)
        self._ready: dict[int, KernelsSpec] = {}
        """What the preparation of a swap came to, by the swap's number."""
        self._before: Counts = {}

    def voice(self) -> list[int]:
        """Return what this rank has to say now."""
        words = self._swap.voice()
        for number in self._classes:
            words += self._words_of(number)
        return words

    def begin(self, directive: Directive, step: int) -> list[Milestone]:
        """Obey what all ranks heard; return what this rank has to tell.

        Args:
            step: the step that begins, counted from 1.
        """
        self._before = ledger.snapshot()
        heard, told = directive.heard, []
        changed = self._switch.apply(directive.policy, step)
        if changed is not None:
            told.append(changed)
        moved, self._switch.moved = self._switch.moved, []
        told += [self._transition(transition, step) for transition in moved]
        told += self._move_breakers(heard[_NUM_SWAP_WORDS:], step)
        told += self._move_swap(directive.policy.swap, heard[:_NUM_SWAP_WORDS], step)
        told = told if self._rank == 0 else []  # all ranks change at one agreed step: once said is enough
        refusal = self._swap.take_refusal()
        if refusal is not None:
            told.append(self._tell("swap_refused", f"rank {self._rank} refuses the swap: {refusal}", step))
        return told

    def end(self, step: int, *, skipped: bool) -> list[Milestone]:
        """Look at what was launched in the step; return what this rank has to tell."""
        told = [self._failed(key, finding, step) for key, finding in self._take_findings()]
        if self._swap.needs_proof and not skipped:
            difference = self._difference()
            self._swap.prove(difference)
            if difference is not None:
                told.append(self._tell("swap_refused", f"rank {self._rank} {difference}", step))
        return told

    def _active(self, number: int) -> Breaker | None:
        """Return the breaker of the chosen kernel for a size class; the fallback has none."""
        kernel = self._switch.kernel
        if kernel == FALLBACK_KERNEL:
            return None
        return self._switch.guard.at(BreakerKey(kernel, number, self._dtype))

    def _words_of(self, number: int) -> list[int]:
        breaker = self._active(number)
        wish = None if breaker is None else breaker.wish(self._clock())
        unfinished = int(number in self._own)
        if breaker is None or wish is None:
            return [0, 0, unfinished]
        move, finding = wish
        index = _KERNELS.index(Kernel(breaker.key.kernel))
        if move is Move.CLOSE:
            return [0, 0, 0]
        if move is Move.PROBE:
            return [0, index + 1 if self._rank == 0 else 0, unfinished]
        assert finding is not None, "a trip has a cause"
        is_own = finding.cause is not Cause.PROBE_TIMEOUT or self._rank == 0
        word = (finding.cause * len(_KERNELS) + index) * _RANKS + self._rank + 1
        return [word if is_own else 0, 0, unfinished]

    def _move_breakers(self, heard: tuple[int, ...], step: int) -> list[Milestone]:
        told = []
        for place, number in enumerate(self._classes):
            trip, due, unfinished = heard[place * _WORDS_A_CLASS : (place + 1) * _WORDS_A_CLASS]
            transition = self._move(number, trip, due, unfinished)
            if transition is not None:
                self._switch.tripped()
                told.append(self._transition(transition, step))
        return told

    def _move(self, number: int, trip: int, due: int, unfinished: int) -> Transition | None:
        guard, now = self._switch.guard, self._clock()
        if trip:
            code, rank = divmod(trip, _RANKS)
            cause, index = divmod(code, len(_KERNELS))
            reason = f"{Cause(cause).name.lower()} on rank {rank - 1}"
            return guard.at(BreakerKey(_KERNELS[index].value, number, self._dtype)).move(Move.TRIP, now, reason)
        if due:
            key = BreakerKey(_KERNELS[due - 1].value, number, self._dtype)
            return guard.at(key).move(Move.PROBE, now, "its time to wait is over")
        breaker = self._active(number)
        if breaker is None or unfinished or breaker.state is not BreakerState.HALF_OPEN:
            return None
        return breaker.move(Move.CLOSE, now, f"{guard.thresholds.half_open_calls} good trial calls on every rank")

    def _move_swap(self, order: SwapOrder | None, heard: tuple[int, ...], step: int) -> list[Milestone]:
        event = self._swap.begin(order, heard)
        if event is None:
            return []
        number, target = (
            self._swap.order.number if self._swap.order else 0,
            self._swap.order and self._swap.order.target,
        )
        previous, why = self._switch.kernel, self._swap.reason
        if event is SwapEvent.BEGUN:
            return [self._tell("swap_preparing", f"all ranks prepare swap {number}: {target}", step)]
        if event is SwapEvent.CHANGE:
            self._switch.swap_in(self._ready[number], number)
            message = f"all ranks change to {target} at step {step}, epoch {self._switch.epoch}"
            changed = self._switch.changed(step, previous, f"swap {number}: {target}")
            return [self._tell("swap_prepared", message, step), changed]
        self._ready.clear()
        if event is SwapEvent.COMMITTED:
            self._switch.keep()
            return [self._tell("swap_committed", f"every rank launched what swap {number} asked for: {target}", step)]
        if event is SwapEvent.ABANDONED:
            return [self._tell("swap_rolled_back", why, step)]
        self._switch.swap_back()
        changed = self._switch.changed(step, previous, f"swap {number} was rolled back: {why}")
        return [self._tell("swap_rolled_back", why, step), changed]

    def _prepare(self, order: SwapOrder) -> str | None:
        """Runs in a thread of its own, beside steps."""
        device = self._switch.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        spec, built = self._switch.build(order.target)
        reason = self._avoided(spec, built)
        if reason is not None:
            return reason
        built.guard = None  # a kernel that fails here is to be seen, not to be replaced
        on_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(on_stream):
            wrong = check_numerics(built, self._calls, self._rank, device, self._switch.guard.thresholds)
        self._ready[order.number] = spec
        return wrong

    def _avoided(self, spec: KernelsSpec, built: SampledNewtonSchulz) -> str | None:
        """Return why a kernel would do none of the work that it was asked to do."""
        kernel, calls = built.kernel_on(self._switch.device), self._calls
        if spec.kernel not in (Kernel.AUTO, kernel):
            return f"an operator pinned the fallback in place of {spec.kernel}; reset its breaker first"
        states = self._switch.guard.states([kernel])
        open_now = [f"{key.size_class} {key.dtype}: {state}" for key, state in states.items() if state.avoids_kernel]
        if open_now:
            return f"the breaker of {kernel} is not closed ({'; '.join(open_now)}); reset it first"
        every = [shape for shapes in calls.shapes for shape in shapes]
        served = {name for name, _ in built.expected(every, calls.dtype, self._switch.device, calls.steps)}
        if every and kernel not in served:
            return f"{kernel} serves no matrix of this job; {', '.join(sorted(served))} would do them"
        return None

    def _difference(self) -> str | None:
        """Compare what was launched in the step with what the new kernel has to do; None when they agree."""
        switch, calls = self._switch, self._calls
        reason = self._avoided(switch.spec, switch.newton_schulz)
        if reason is not None:
            return f"did not run it: {reason}"
        wanted = switch.newton_schulz.expected(calls.shapes[self._rank], calls.dtype, switch.device, calls.steps)
        after = ledger.snapshot()
        found = launched(self._before, after)
        if found <= set(wanted) and bool(found) == bool(wanted) and set(applied(self._before, after)) <= found:
            return None
        texts = [" and ".join(f"{k} {a}" for k, a in sorted(keys)) or "nothing" for keys in (found, wanted)]
        return f"launched {texts[0]}, and {texts[1]} was asked for"

    def _take_findings(self) -> list[tuple[BreakerKey, Finding]]:
        """Return what was found since the last time; of the same kind only the 1st, 2nd, 4th, 8th... are told."""
        guard = self._switch.guard
        found, guard.findings = guard.findings, []
        counts = ((key, finding, guard.at(key).failures[finding.cause]) for key, finding in found)
        return [(key, finding) for key, finding, number in counts if number & (number - 1) == 0]

    def _failed(self, key: BreakerKey, finding: Finding, step: int) -> Milestone:
        text = f"{key.kernel} failed on rank {self._rank} at step {step}: {finding.detail}"
        return self._tell("kernel_failed", text, step, **_named(key), cause=finding.cause.name.lower())

    def _transition(self, transition: Transition, step: int) -> Milestone:
        key, states = transition.key, {"from": str(transition.before), "to": str(transition.after)}
        text = (
            f"the breaker of {key.kernel} ({key.size_class} {key.dtype}) went from {states['from']} to {states['to']}"
        )
        message = f"{text} at step {step}: {transition.reason}"
        return self._tell("breaker_changed", message, step, **_named(key), **states, reason=transition.reason)

    def _tell(self, name: str, message: str, step: int, **data: str | int) -> Milestone:
        facts: dict[str, str | int] = {"step": step, "epoch": self._switch.epoch, **data}
        if name.startswith("swap") and self._swap.order is not None:
            facts["swap"] = self._swap.order.number
        return Milestone.model_validate(
            {"name": name, "at": time.time(), "message": message, "rank": self._rank, "data": facts}
        )

    @property
    def is_swapping(self) -> bool:
        """True while a swap is under way."""
        return self._swap.phase is not SwapPhase.IDLE


def _named(key: BreakerKey) -> dict[str, str | int]:
    return {"kernel": key.kernel, "size_class": key.size_class, "dtype": key.dtype}
