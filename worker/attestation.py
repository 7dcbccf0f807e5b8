"""What a rank launched in each step beside what was chosen for it, and its matrices by parameter beside the plan.

The choice is what :meth:`~dmuon_runtime.NewtonSchulz.expected` says before the step; what ran is what the ledger and
the optimizer counted in it. Once something differs the rank goes on saying so: weights that were trained by something
else do not become good again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dmuon_runtime import ledger
from dmuon_runtime.plan import RuntimePlan
from worker.contract.kernels import FALLBACK_KERNEL
from worker.kernels import KernelSwitch, NsCalls, applied, launched

__all__ = ["Attestation"]

_MAX_NAMED = 8
"""Parameters that are named at once; the others are counted."""
Counts = Mapping[tuple[str, str], ledger.NsCount]


class Attestation:
    """One rank's comparison; :attr:`offenders` is what it has come to.

    Args:
        rank: this one.
        plan: the job's.
        switch: holds the Newton-Schulz of each step.
        calls: the Newton-Schulz calls of a step.
    """

    def __init__(self, rank: int, plan: RuntimePlan, switch: KernelSwitch, calls: NsCalls) -> None:
        self._switch, self._calls, self._shapes = switch, calls, calls.shapes[rank]
        self._planned = {
            entry.name: entry.num_matrices
            for entry in plan.parameters
            if entry.owner == rank and entry.num_matrices
        }  # fmt: skip
        self._chosen: tuple[int, Counter[tuple[str, str]]] | None = None
        """Matrices by kernel and form of an epoch: it grows with whatever could change them."""
        self._before: Counts = {}
        self._fallback_steps = 0
        self._steps = 0
        self._launched = ""
        self._parameters = ""

    @property
    def offenders(self) -> tuple[str, ...]:
        """What differs, in words; empty while all ran as chosen and planned."""
        return tuple(text for text in (self._launched, self._parameters) if text)

    def begin(self) -> None:
        """Note where the counts stand, when a step begins and its kernel is settled."""
        self._before, self._fallback_steps = ledger.snapshot(), self._switch.guard.fallback_steps

    def end(self, step: int, orthogonalized: Mapping[str, int], *, computed: bool) -> None:
        """Compare.

        Args:
            step: the step that was done, counted from 1.
            orthogonalized: matrices by parameter since the attempt began.
            computed: False for a skipped step that left Newton-Schulz out.
        """
        self._steps += computed
        wrong = self._stranger(ledger.snapshot())
        if wrong and not self._launched:
            self._launched = f"step {step} {wrong}"
        self._parameters = self._differing(orthogonalized)

    def _stranger(self, after: Counts) -> str:
        """Return what was launched and not chosen, or counted and not launched."""
        ran, counted, chosen = launched(self._before, after), applied(self._before, after), self._choice()
        fell_back = self._switch.guard.fallback_steps > self._fallback_steps
        kernels = {kernel for kernel, _ in chosen}
        allowed = kernels | ({str(FALLBACK_KERNEL)} if fell_back else set())
        strangers = sorted({kernel for kernel, _ in ran | counted.keys()} - allowed)
        silent = counted.keys() - ran
        found = []
        if strangers:
            asked = " and ".join(sorted(kernels)) or "nothing"
            found.append(f"launched {' and '.join(strangers)} where {asked} was chosen")
        elif not fell_back and counted != chosen and sum(counted.values()) == chosen.total():
            found.append(f"ran {_listed(counted)} where {_listed(chosen)} was chosen")
        if silent:
            found.append(
                f"counted matrices of {' and '.join(sorted(map(' '.join, silent)))}, of which nothing was launched"
            )
        return "; ".join(found)

    def _choice(self) -> Counter[tuple[str, str]]:
        switch = self._switch
        if self._chosen is None or self._chosen[0] != switch.epoch:
            expected = switch.newton_schulz.expected(self._shapes, self._calls.dtype, switch.device, self._calls.steps)
            self._chosen = switch.epoch, expected
        return self._chosen[1]

    def _differing(self, orthogonalized: Mapping[str, int]) -> str:
        names = sorted(self._planned.keys() | orthogonalized.keys())
        found = [
            f"{name} {orthogonalized.get(name, 0)} instead of {wanted}"
            for name in names
            if orthogonalized.get(name, 0) != (wanted := self._planned.get(name, 0) * self._steps)
        ]
        if not found:
            return ""
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        return f"orthogonalised matrices of {', '.join(found[:_MAX_NAMED])}{more}"


def _listed(matrices: Mapping[tuple[str, str], int]) -> str:
    return " and ".join(f"{number} by {kernel} {form}" for (kernel, form), number in sorted(matrices.items()))
