"""What follows when an attempt has ended: another one after a pause, or the end of the job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.reconcile.decide import End
from worker.contract.spec import JobSpec
from worker.contract.states import JobState, Reason

__all__ = ["Next", "Past", "decide_next", "is_restartable"]

_INFRASTRUCTURE = frozenset({Reason.WORKER_LOST, Reason.NODE_LOST, Reason.STALLED, Reason.INTERNAL})
_OWN = frozenset({Reason.USER_ERROR})


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """An attempt that has ended: why, and how many steps it did by itself."""

    reason: Reason
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What becomes of the job."""

    state: JobState
    message: str
    delay_s: float = 0.0
    """Of a job that is RESTARTING: seconds until it may start again."""
    used: int = 0
    """Restarts of its budget, this one included."""
    budget: int = 0


def is_restartable(reason: Reason) -> bool:
    """Tell whether an attempt that ended like this may be followed by another one."""
    return reason in _INFRASTRUCTURE | _OWN


def decide_next(end: End, past: Sequence[Past], spec: JobSpec) -> Next:
    """Return where a job goes whose attempt ended as ``end``.

    Args:
        past: all attempts of the job, oldest first; the last is the one that ended.
        spec: its ``failure`` holds the budgets. Lost infrastructure and errors of the job's own are charged apart; the
            pause doubles with every failure of either kind. An attempt that did ``reset_after_steps`` steps wiped out
            what was charged before it.
    """
    policy = spec.failure
    if not is_restartable(end.reason):
        return Next(state=end.reason.end_state, message=end.message)
    if end.reason is Reason.STALLED and spec.watchdog.action == "fail":
        return Next(state=JobState.FAILED, message=f"{end.message}; /watchdog/action is fail")
    charged = _charged(past, policy.reset_after_steps)
    kind, name = (_OWN, "user_error_restarts") if end.reason in _OWN else (_INFRASTRUCTURE, "infrastructure_restarts")
    used, budget = sum(reason in kind for reason in charged), int(getattr(policy, name))
    if used > budget:
        spent = f"/failure/{name} is {budget}, and as many restarts in a row did not help: {end.message}"
        return Next(state=JobState.FAILED, message=spent if budget else end.message, used=used, budget=budget)
    delay_s = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(len(charged) - 1, 60))
    message = f"{end.message}; restart {used} of {budget} in {delay_s:g} s"
    return Next(state=JobState.RESTARTING, message=message, delay_s=delay_s, used=used, budget=budget)


def _charged(past: Sequence[Past], reset_after_steps: int) -> list[Reason]:
    """Return the failures that count, newest first."""
    found = []
    for attempt in reversed(past):
        if is_restartable(attempt.reason):
            found.append(attempt.reason)
        if attempt.steps >= reset_after_steps:
            break
    return found
