"""What the runtime counted of a contestant's steps, of all ranks, beside its plan."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dmuon_runtime as dmuon
from benchmarks._exposed import BEHIND_COMPUTE
from dmuon_runtime import ledger

__all__ = ["Counted", "counted_row", "ns_seconds"]


def ns_seconds() -> float:
    """Return the seconds of all Newton-Schulz of this process so far."""
    return sum(count.seconds for count in ledger.snapshot().values())


@dataclass(slots=True)
class Counted:
    """What one rank counted of a contestant."""

    comm: dict[tuple[str, str], tuple[float, float, int]]
    """Seconds, exposed seconds and payload bytes by route and phase."""
    owner_s: float
    matrices: int
    ns_s: float

    @classmethod
    def between(
        cls, before: dmuon.CountersSnapshot | None, after: dmuon.CountersSnapshot | None, ns_s: float
    ) -> Counted | None:
        """Return what was counted between two looks; None where the runtime is not at work."""
        if before is None or after is None:
            return None
        comm = {}
        for key, total in after.comm.items():
            earlier = before.comm.get(key, dmuon.CommCount())
            comm[key] = (
                total.seconds - earlier.seconds,
                total.exposed_seconds - earlier.exposed_seconds,
                total.payload_bytes - earlier.payload_bytes,
            )
        owner_s = after.owner_compute_seconds - before.owner_compute_seconds
        return cls(comm, owner_s, after.ns_planned_matrices - before.ns_planned_matrices, ns_s)


def counted_row(
    plan: dmuon.RuntimePlan, ranks: Sequence[Counted], rounds: int, steps: int, step_ms: float
) -> dict[str, Any]:
    """Return what all ranks counted, a step, beside the plan; of turns of ``steps`` timed steps after one more."""
    number = rounds * (steps + 1)
    owner_s = [rank.owner_s / number for rank in ranks]
    share = {phase: _exposed_ms(ranks, phase, rounds, steps) / step_ms for phase in (*BEHIND_COMPUTE, "publish")}
    within = max(sum(_exposed_s(rank, phase) for phase in BEHIND_COMPUTE) for rank in ranks) * 1e3 / number
    return {
        "communication": _communication(plan, ranks, rounds, steps),
        "exposed, share of the step": share,
        "forward and backward exposed, share of the step": within / step_ms,
        "owner balance planned": plan.predicted_imbalance,
        "owner balance measured": max(owner_s) / statistics.mean(owner_s),
        "owner ms": [seconds * 1e3 for seconds in owner_s],
        "owner compute ms": max(owner_s) * 1e3,
        "planned cost": [rank.cost for rank in plan.ranks],
        "matrices": [rank.matrices // number for rank in ranks],
        "planned matrices": [rank.matrices for rank in plan.ranks],
        "newton-schulz ms": max(rank.ns_s for rank in ranks) * 1e3 / number,
        "planned resident GiB": max(rank.resident_bytes for rank in plan.ranks) / 2**30,
    }


def _communication(
    plan: dmuon.RuntimePlan, ranks: Sequence[Counted], rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Return mean seconds and the most exposed ones of a rank, and bytes of all ranks, by route and phase."""
    planned: dict[tuple[str, str], int] = {}
    for table in plan.rank_traffic:
        for key, item in table.items():
            planned[key] = planned.get(key, 0) + item.payload_bytes
    found = {}
    for key in dict.fromkeys(key for rank in ranks for key in rank.comm):
        of_it = [rank.comm[key] for rank in ranks if key in rank.comm]
        seconds, number = sum(each[0] for each in of_it), rounds * (steps + 1)
        exposing = _exposing(key[1], rounds, steps)
        found["/".join(key)] = {
            "ms": seconds * 1e3 / len(of_it) / number,
            "exposed ms": max(each[1] for each in of_it) * 1e3 / exposing,
            "overlap": 1 - sum(each[1] for each in of_it) * number / exposing / seconds if seconds > 0 else None,
            "bytes": sum(each[2] for each in of_it) // number,
            "planned bytes": planned.get(key, 0),
        }
    return found


def _exposed_s(rank: Counted, phase: str) -> float:
    return sum(exposed for (_, where), (_, exposed, _) in rank.comm.items() if where == phase)


def _exposed_ms(ranks: Sequence[Counted], phase: str, rounds: int, steps: int) -> float:
    return max(_exposed_s(rank, phase) for rank in ranks) * 1e3 / _exposing(phase, rounds, steps)


def _exposing(phase: str, rounds: int, steps: int) -> int:
    """Return the steps that could wait: the first of a turn finds its weights published while nobody trained."""
    return rounds * (steps if phase == "publish" else steps + 1)
