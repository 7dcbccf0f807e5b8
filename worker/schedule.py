"""The learning rate of a step: a pure function of (spec, step), so a resumed job has the rates of an unbroken one."""

from __future__ import annotations

import math

from worker.contract.spec import ScheduleSpec

__all__ = ["lr_ratio"]


def lr_ratio(schedule: ScheduleSpec, steps: int, step: int) -> float:
    """Return what the base rates of ``step`` (counted from 0) are multiplied by.

    Warm-up rises in equal parts to 1, reached at step ``warmup_steps - 1``. A decay starts there and reaches
    ``final_ratio`` in the last step.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    progress = min(1.0, (step + 1 - warmup) / max(1, steps - warmup))
    share = 1.0 - progress if schedule.kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * share
