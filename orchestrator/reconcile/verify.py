"""Did what ran match the plan? Matrices, payload bytes and launched kernels, counted beside what was planned. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.totals import steps_with_traffic
from worker.contract.messages import RankReport
from worker.contract.plan import PlanReport

__all__ = ["RoutesVerdict", "decide_routes_verified"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesVerdict:
    """Counted against planned, up to one step that every rank has reported."""

    step: int
    skipped: int
    matrices: int
    planned_matrices: int
    payload_bytes: int
    planned_bytes: int
    differences: tuple[str, ...]
    """Each figure that differs; empty when what ran is what was planned."""

    @property
    def verified(self) -> bool:
        """True when nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        if self.differences:
            return f"after step {self.step} what ran is not what was planned: " + "; ".join(self.differences)
        return (
            f"after step {self.step}: {self.matrices} matrices orthogonalised and {self.payload_bytes} bytes "
            "communicated by all ranks, as planned; what was launched is what was chosen"
        )


def decide_routes_verified(plan: PlanReport, reports: Sequence[RankReport]) -> RoutesVerdict | None:
    """Compare all ranks' totals after one step with the plan.

    Args:
        plan: the job's plan.
        reports: reports of one attempt for one step.

    Returns:
        None while a rank is missing, since a part of the figures proves nothing; and always for a baseline, whose code
        is torch's and counts nothing.
    """
    if plan.ns_matrices is None:
        return None
    steps = {report.step for report in reports}
    if len(steps) != 1 or {report.rank for report in reports} != set(range(plan.world_size)):
        return None
    step, skipped = steps.pop(), max(report.skipped_total for report in reports)
    done = min(report.steps_done for report in reports)
    matrices = sum(total.matrices for report in reports for total in report.ns)
    left_out = skipped - max(report.withheld_total for report in reports)
    planned_matrices = plan.ns_matrices * (done - left_out)
    counted, planned = _counted_bytes(reports), _planned_bytes(plan, done, left_out)
    differences = [
        f"{route}/{phase}: {counted[route, phase]} bytes counted, {planned[route, phase]} planned"
        for route, phase in sorted(counted.keys() | planned.keys())
        if counted[route, phase] != planned[route, phase]
    ]
    offenders = _ranks_with_other_matrices(plan, reports, done - left_out)
    if matrices != planned_matrices or offenders:
        text = f"{matrices} matrices orthogonalised, {planned_matrices} planned"
        differences.insert(0, f"{text} ({', '.join(offenders)})" if offenders else text)
    differences += [f"rank {report.rank}: {text}" for report in reports for text in report.offenders]
    if len({report.first_step for report in reports}) > 1:
        differences.insert(0, "the ranks do not agree on the step at which the attempt began")
    if len({(report.skipped_total, report.withheld_total) for report in reports}) > 1:
        differences.insert(0, "the ranks do not agree on how many steps were skipped")
    return RoutesVerdict(
        step=step,
        skipped=skipped,
        matrices=matrices,
        planned_matrices=planned_matrices,
        payload_bytes=counted.total(),
        planned_bytes=planned.total(),
        differences=tuple(differences),
    )


def _ranks_with_other_matrices(plan: PlanReport, reports: Sequence[RankReport], steps: int) -> list[str]:
    """Return the ranks that did more or less of their own than planned: in sums alone two errors could cancel."""
    planned = {rank.rank: rank.matrices * steps for rank in plan.ranks}
    counted = {report.rank: sum(total.matrices for total in report.ns) for report in reports}
    return [
        f"rank {rank} {counted[rank]} instead of {planned[rank]}"
        for rank in sorted(counted.keys() & planned.keys())
        if counted[rank] != planned[rank]
    ]


def _counted_bytes(reports: Sequence[RankReport]) -> Counter[tuple[str, str]]:
    counted: Counter[tuple[str, str]] = Counter()
    for report in reports:
        for total in report.comm:
            counted[total.route, total.phase] += total.payload_bytes
    return counted


def _planned_bytes(plan: PlanReport, done: int, skipped: int) -> Counter[tuple[str, str]]:
    planned: Counter[tuple[str, str]] = Counter()
    for traffic in plan.traffic:
        steps = steps_with_traffic(traffic.phase, done, skipped)
        planned[traffic.route, traffic.phase] += traffic.total_payload_bytes * steps
    return planned
