"""Whether an attempt has stalled, and which rank the others wait for: pure, and free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from worker.contract.failure import WatchdogSpec

__all__ = ["PHASES", "Beat", "Seen", "Stall", "decide_stall"]

PHASES = ("set_up", "compile", "forward", "backward", "reduce", "newton_schulz", "publish", "checkpoint")
"""Each has a deadline ``/watchdog/<phase>_s``; a rank in another phase (``joining``, ``done``) has none."""


class Beat(BaseModel):
    """Where a rank says that it is. Seconds are the rank's own, so clocks need not agree."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: str
    phase_seconds: float
    """Since it began this phase."""
    step: int = 0
    """Step in progress, counted from 1."""
    first_step: bool = True
    """True until a step of this attempt is done: something may still have to be compiled."""
    marks: int = 0
    """Phases begun and collectives issued: of two ranks the one with fewer is behind."""
    waiting: str = ""
    """The collective that it waits for; empty when it computes."""
    waiting_seconds: float = 0.0

    def __str__(self) -> str:
        where = f"in {self.phase} for {self.phase_seconds:.1f} s at step {self.step}"
        return where + (f", waiting {self.waiting_seconds:.1f} s for {self.waiting}" if self.waiting else "")


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a rank that has not ended."""

    beat: Beat | None
    """The last answer; None before the first."""
    silent_s: float
    """Since that answer, or since it was first asked."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Some rank took too long.

    Attributes:
        ranks: Those that the others wait for, or all that are equally far.
        phase: In which they are.
        collective: What the others wait for; empty when nobody waits in a collective.
        message: All of that in words.
    """

    ranks: tuple[int, ...]
    phase: str
    collective: str
    message: str


def decide_stall(seen: Mapping[int, Seen], deadlines: WatchdogSpec) -> Stall | None:
    """Return the stall that there is, or None.

    It is a stall when one rank has been silent, or in one phase, for longer than ``deadlines`` allow. Blamed are silent
    ranks; else those that compute while others wait; among equals those that are behind.
    """
    late = [text for rank in sorted(seen) if (text := _late(rank, seen[rank], deadlines))]
    if not late:
        return None
    places = {rank: _place(entry, deadlines) for rank, entry in seen.items()}
    ranks = tuple(sorted(rank for rank, place in places.items() if place == min(places.values())))
    beat = seen[ranks[0]].beat
    waiting = {rank: entry.beat for rank, entry in seen.items() if entry.beat is not None and entry.beat.waiting}
    others = {rank: found for rank, found in waiting.items() if rank not in ranks} or waiting
    collective = max((found.waiting for found in others.values()), default="")
    blamed = "; ".join(f"rank {rank} is {seen[rank].beat or 'silent since it began'}" for rank in ranks)
    held = "; ".join(f"rank {rank} waits for {found.waiting}" for rank, found in others.items() if rank not in ranks)
    message = f"{', '.join(late)}. {blamed}" + (f"; {held}" if held else "")
    return Stall(ranks, "unknown" if beat is None else beat.phase, collective, message)


def _place(entry: Seen, deadlines: WatchdogSpec) -> tuple[bool, bool, int]:
    """Return what sorts a rank before those that wait for it."""
    marks = 0 if entry.beat is None else entry.beat.marks
    return entry.silent_s <= deadlines.silent_s, entry.beat is not None and bool(entry.beat.waiting), marks


def _late(rank: int, entry: Seen, deadlines: WatchdogSpec) -> str:
    if entry.silent_s > deadlines.silent_s:
        return (
            f"rank {rank} has answered nothing for {entry.silent_s:.1f} s (/watchdog/silent_s {deadlines.silent_s:g})"
        )
    beat = entry.beat
    if beat is None or beat.phase not in PHASES:
        return ""
    name = f"{beat.phase}_s"
    limit_s = float(getattr(deadlines, name))
    if beat.first_step and beat.phase != "set_up" and deadlines.compile_s > limit_s:
        name, limit_s = "compile_s", deadlines.compile_s
    if beat.phase_seconds <= limit_s:
        return ""
    return f"rank {rank} has been in {beat.phase} for {beat.phase_seconds:.1f} s (/watchdog/{name} {limit_s:g})"
