"""What every panel of every board has to show of the example in its middle: by legend, between which bounds.

Numbers of the model and of the plan are worked out here from the spec: 4 layers of 4 matrices 192 x 192 and 3 of
512 x 192, 9 norms, embedding and head of 256 x 192, two ranks in Z3, 12 sequences of 128 bytes a step. A rate is that
number times the steps a second, which are themselves held to the series of steps. What a run does not fix (seconds)
lies between zero and what the wall clock leaves, or is worked out from another panel.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

from dashboards.boards import BOARDS
from orchestrator import resources as r
from orchestrator.client import Client
from orchestrator.exporter import QUEUE_WAIT_BOUNDS_S
from tests.e2e.prometheus import Prometheus
from worker.contract.messages import STEP_SECONDS_BUCKETS
from worker.contract.states import Reason

__all__ = ["Look", "complaints", "look_at_panels"]

WINDOW_S = 30.0
SCRAPE_S = 5.0
ELEMENTS = {"muon": 4 * (4 * 192 * 192 + 3 * 512 * 192), "adamw": 9 * 192, "sharded_adamw": 2 * 256 * 192}
PHASES = ("forward", "backward", "reduce")
BYTES = {route: elements * 4 * len(PHASES) * 2 for route, elements in ELEMENTS.items()}
"""Payload a step, in float32, over both ranks."""
COLLECTIVES = {"muon": 4 * 2 * 3 * 2, "adamw": 5 * 3 * 2, "sharded_adamw": 2 * 3 * 2}
"""A step, over both ranks: units, of muon with two owners each, times phases."""
LAUNCHES = {"cublas direct": 20, "cublas gram": 36}
"""Products a step: the square matrices of a rank in one direct group, the others in one Gram group with a restart."""
TOKENS = 12 * 128
OTHERS = "*"
"""Stands for legends that belong to other jobs of the service, or to other handlers."""
Bounds = tuple[float, float]
Panel = Mapping[str, Bounds]
Shown = dict[str, float]


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen and known at one moment of the run."""

    at: float
    """Wall clock of all queries."""
    job: r.JobResource
    jobs: Counter[str]
    """Jobs of the service by state."""
    ranks: tuple[r.RankFigures, ...]
    shown: dict[str, Shown]
    """Numbers by legend, by board and title of the panel."""
    twice: list[str]
    """Panels in which two series have one legend."""
    steps: int
    steps_a_second: float
    num_series: float
    points: list[r.StepPoint] = field(default_factory=list)
    """Of the whole run; filled when it is over."""

    def of(self, title: str) -> Shown:
        """Return what the panel of that title shows; the first where there are two."""
        return next(shown for where, shown in self.shown.items() if where.endswith(f" / {title}"))

    @property
    def slack(self) -> float:
        """Relative: of the steps in the window one may be counted by one rank and not yet by the other, at each end."""
        return 2.0 / (self.steps_a_second * WINDOW_S)

    def steady(self, a_step: float) -> Bounds:
        """Bounds of the rate of what every step does ``a_step`` times."""
        return around(a_step * self.steps_a_second, self.slack)

    def recent(self, value: Callable[[r.StepPoint], float | None], back: int = 1) -> Bounds:
        """Bounds of a figure of the last step that was told, or of one before it."""
        values = [value(point) for point in self.points if self.steps - back <= point.step <= self.steps]
        found = [each for each in values if each is not None]
        return min(found), max(found)


def around(value: float, relative: float = 1e-6) -> Bounds:
    """Bounds of what is to be ``value``."""
    return value * (1 - relative), value * (1 + relative)


def exactly(values: Mapping[str, float]) -> dict[str, Bounds]:
    """Bounds of numbers that are known."""
    return {legend: (value, value) for legend, value in values.items()}


def _ask(prometheus: Prometheus, expr: str, job_id: str, at: float) -> list[tuple[dict[str, str], float]]:
    text = expr.replace("$__rate_interval", f"{WINDOW_S:.0f}s").replace("$job", job_id)
    return [(entry["metric"], float(entry["value"][1])) for entry in prometheus.query(text, at)]


def look_at_panels(prometheus: Prometheus, client: Client, job_id: str, at: float) -> Look:
    """Ask every query of every panel at one moment, and the service for what it knows then."""
    shown: dict[str, Shown] = {}
    twice: list[str] = []
    for board in BOARDS:
        for panel in board.panels:
            where = f"{board.uid} / {panel.title}"
            values = shown[where] = {}
            for query in panel.queries:
                for labels, value in _ask(prometheus, query.expr, job_id, at):
                    legend = re.sub(r"\{\{(\w+)\}\}", lambda name, of=labels: of.get(name[1], "?"), query.legend)
                    twice += [where] if legend in values else []
                    values |= {} if math.isnan(value) else {legend: value}
    own = f'{{job="{job_id}"}}'
    one = {
        name: _ask(prometheus, expr, job_id, at)[0][1]
        for name, expr in {
            "steps": f"dmuon_steps_total{own}", "rate": f"rate(dmuon_steps_total{own}[$__rate_interval])",
            "series": f'count({{job="{job_id}", __name__=~"dmuon_.*"}})',
        }.items()
    }  # fmt: skip
    states = Counter(job.state for job in client.jobs(page_size=200).jobs)
    return Look(
        at, client.job(job_id), states, client.routes(job_id).ranks, shown, twice, int(one["steps"]), one["rate"],
        one["series"],
    )  # fmt: skip


def _fleet(look: Look) -> dict[str, Panel]:
    job, first = look.job, look.job.attempts[0]
    waited = first.created_at - job.created_at
    place = bisect.bisect_left(QUEUE_WAIT_BOUNDS_S, waited)
    alone = sum(look.jobs.values()) == 1
    waits = ([0.0, *QUEUE_WAIT_BOUNDS_S][place], QUEUE_WAIT_BOUNDS_S[place]) if alone else (0.0, 900.0)
    exposed, comm = (sum(look.of(f"{name} by route and phase").values()) for name in _COMM)
    gpus = look.of("GPUs")["total"]
    return {
        "Jobs by state": exactly(look.jobs),
        "Live jobs and their states": {f"{job.name} {job.id}: RUNNING": (1, 1), OTHERS: (1, 1)},
        "Jobs that ended, by reason, in an hour": {},
        "Restarts by reason, in an hour": dict.fromkeys(Reason, (0, 0)),
        "Kernel swaps by result, in a day": dict.fromkeys(("committed", "rolled_back", "failed"), (0, 0)),
        "Breaker changes, in a day": {OTHERS: (0, 0)},
        "Throughput by job": {job.id: look.steady(TOKENS), OTHERS: (0, 0)},
        "Overlap by job": {job.id: around(1 - exposed / comm)},
        "Queue depth": {"waiting": (0, 0)},
        "Queue wait": dict.fromkeys(("median", "95 %"), waits),
        "CPUs": {"total": (2, 2), "free": (0, 0)},
        "GPUs": {"total": (0, 1024), "free": (gpus, gpus)},
        "Processes on GPUs without a job": {OTHERS: (0, 0)},
        "GPUs that cannot be watched": {OTHERS: (0, 1024)},
    }


_COMM = ("Exposed communication", "Communication")


def _job(look: Look) -> dict[str, Panel]:
    seconds = [p.step_seconds for p in look.points if look.steps - 1.5 * WINDOW_S * look.steps_a_second < p.step]
    first = max([0.0, *(bound for bound in STEP_SECONDS_BUCKETS if bound <= min(seconds))])
    last = min([*(bound for bound in STEP_SECONDS_BUCKETS if bound >= max(seconds)), math.inf])
    rates = look.of("Learning rate by route")
    sizes = {"muon": (0.15, 0.21), "adamw": (0.01, 2.0), "sharded_adamw": (0.01, 2.0)}
    """Of an update over its rate: 0.2 is what ``match_rms_adamw`` makes of a matrix with singular values of 1."""
    ages = _heartbeat_age(look)
    return {
        "Loss": {"loss": look.recent(lambda point: point.loss)},
        "Throughput": {"tokens a second": look.steady(TOKENS)},
        "Step time": {"median": (first, last), "95 %": (first, last)},
        "Gradient norm": {"global norm": look.recent(lambda point: point.grad_norm)},
        "Update RMS by route": {
            route: (low * rates[route], high * rates[route]) for route, (low, high) in sizes.items()
        },
        "Learning rate by route": {
            route: look.recent(lambda point, name=route: point.lr[name]) for route in ELEMENTS  # type: ignore[misc]
        },
        "Skipped steps": {"skipped": (0, 0)},
        "Parameters by route": exactly({"muon": 28, "adamw": 9, "sharded_adamw": 2}),
        "Parameter elements by route": exactly(ELEMENTS),
        "State": {"RUNNING": (1, 1)},
        "Attempts": {"attempts": (1, 1)},
        "Conditions": exactly(dict.fromkeys((f"{c.type} {c.status}" for c in look.job.conditions), 1)),
        "Heartbeat age by rank": {"rank 0": ages, "rank 1": ages},
        "Memory by rank": dict.fromkeys(("rank 0", "rank 1"), (5e7, float(psutil.virtual_memory().total))),
        "Age of the last checkpoint": {},
    }  # fmt: skip


def _heartbeat_age(look: Look) -> Bounds:
    """Between that of the last step that was told and that of the one before it, a second for storing it apart."""
    youngest, oldest = look.recent(lambda point: look.at - point.at)
    return max(0.0, youngest - 1), oldest + 1


def _runtime(look: Look) -> dict[str, Panel]:
    exposed, comm = (look.of(f"{name} by route and phase") for name in _COMM)
    keys = [f"{route} {phase}" for route in ELEMENTS for phase in PHASES]
    of_route = {
        route: [sum(part[f"{route} {phase}"] for phase in PHASES) for part in (exposed, comm)] for route in ELEMENTS
    }
    measured = {f"{route} measured": around(number, look.slack) for route, number in BYTES.items()}
    planned = exactly({f"{route} planned": number for route, number in BYTES.items()})
    return {
        "Overlap by route": {route: around(1 - part / whole) for route, (part, whole) in of_route.items()},
        "Overlap by route and phase": {key: around(1 - exposed[key] / comm[key]) for key in keys},
        "Exposed communication by route and phase": {key: (0.0, comm[key] * 1.001) for key in keys},
        "Communication by route and phase": dict.fromkeys(keys, (1e-9, 2.0)),
        "Collectives a step": {route: around(number, look.slack) for route, number in COLLECTIVES.items()},
        "Payload bytes a step, measured and planned": measured | planned,
        **_owners(look),
        **_kernels(look),
    }


def _owners(look: Look) -> dict[str, Panel]:
    seconds, costs = look.of("Owner compute by rank"), {f"rank {e.rank}": e.planned_cost for e in look.ranks}
    worst, dearest = max(seconds, key=seconds.__getitem__), max(costs, key=costs.__getitem__)
    even, plan = sum(costs.values()) / 2, look.job.plan
    assert plan is not None and plan.predicted_imbalance is not None and plan.ns_flops is not None
    assert plan.ns_flops < 2 * even < 1.2 * plan.ns_flops, "the cost is that of Newton-Schulz, and little else"
    return {
        "Worst owner, measured": {worst: around(seconds[worst])},
        "Worst owner, planned": {dearest: (costs[dearest], costs[dearest])},
        "Owner imbalance, measured and planned": {
            "measured": around(2 * max(seconds.values()) / sum(seconds.values())),
            "planned": around(max(costs.values()) / even),
        },
        "Owner compute by rank": dict.fromkeys(("rank 0", "rank 1"), (1e-6, 1.0)),
    }


def _kernels(look: Look) -> dict[str, Panel]:
    busy = sum(look.of("Owner compute by rank").values())
    return {
        "Newton-Schulz launches by kernel": {key: look.steady(number) for key, number in LAUNCHES.items()},
        "Matrices orthogonalised over planned": {"measured / planned": around(1.0, look.slack)},
        "Breaker": exactly(dict.fromkeys(("quack closed", "cute_sm80 closed", "blocked closed"), 1)),
        "Launches that were only compared": {},
        "Calls done by the fallback": {"calls a second": (0, 0)},
        "Newton-Schulz error": {"deviation, at most": (1e-3, 1.05)},
        "Seconds in Newton-Schulz": dict.fromkeys(LAUNCHES, (1e-6, busy)),
        "Kernel epoch by rank": exactly({"rank 0": 0, "rank 1": 0}),
    }


def _control_plane(look: Look) -> dict[str, Panel]:
    others = sum(look.jobs.values()) - 1
    return {
        "Requests by handler": {"/metrics": around(1 / SCRAPE_S, 0.3), "/v1/jobs/{job_id}": (0, 5.5), OTHERS: (0, 6)},
        "Latency, 99 %": {"/metrics": (1e-6, SCRAPE_S), OTHERS: (1e-6, 10)},
        "Share of requests that fail": {"5xx": (0, 0)},
        "Reconciler pass, 95 %": {"95 %": (1e-6, 10)},
        "Age of the last pass": {"age": (0, SCRAPE_S + 10)},
        "Conditions that are not True": {OTHERS: (0, others)},
        "Oldest heartbeat": {"age": _heartbeat_age(look)},
        "Reports dropped": {look.job.id: (0, 0), OTHERS: (0, 0)},
        "Series by job, and over the budget": {
            look.job.id: (look.num_series, look.num_series), f"{look.job.id} left out": (0, 0), OTHERS: (0, 200),
        },
        "Open streams": {"streams": (0, 0)},
        "Scrape duration": {"scrape": (1e-6, SCRAPE_S)},
    }  # fmt: skip


_EXPECTED: dict[str, Callable[[Look], dict[str, Panel]]] = {
    "dmuon-fleet": _fleet, "dmuon-job": _job, "dmuon-runtime": _runtime, "dmuon-control-plane": _control_plane,
}  # fmt: skip


def complaints(look: Look) -> list[str]:
    """Return every panel that shows something else than the run fixes, or of which nothing is said here."""
    expected = {f"{uid} / {title}": p for uid, of in _EXPECTED.items() for title, p in of(look).items()}
    found = [f"{where}: two series have one legend" for where in look.twice]
    found += [f"{where}: a panel and what is said of it go together" for where in expected.keys() ^ look.shown.keys()]
    done = sum(look.at - WINDOW_S - 2 <= point.at <= look.at for point in look.points)
    if not 0.5 * done <= look.steps_a_second * WINDOW_S <= 1.5 * done:
        found.append(f"{look.steps_a_second:.2f} steps a second, but {done} in the last {WINDOW_S:.0f} s")
    for where, bounds in expected.items():
        shown = look.shown.get(where, {})
        found += [f"{where}: {legend} is missing" for legend in bounds.keys() - shown.keys() - {OTHERS}]
        for legend, value in shown.items():
            low, high = bounds.get(legend, bounds.get(OTHERS, (math.inf, -math.inf)))
            if not low <= value <= high:
                found.append(f"{where}: {legend} is {value}, expected {low} to {high}")
    return found
