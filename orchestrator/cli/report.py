"""The closing table of a job: what was learned, what the wires did, and whether it was what the plan said."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator import resources as r
from orchestrator.client import Client
from worker.contract.plan import CostPlan

__all__ = ["Report", "collect_report", "render_plan", "render_report"]


class Report(r.Resource):
    """All that the table shows."""

    job: r.JobResource
    first_loss: float | None
    last_loss: float | None
    routes: r.RoutesResource | None


def collect_report(client: Client, job_id: str) -> Report:
    """Ask the service for all that the table shows."""
    job = client.job(job_id)
    first = client.metrics(job_id, limit=1).points
    routes = client.routes(job_id) if job.plan is not None else None
    return Report(job=job, first_loss=first[0].loss if first else None, last_loss=job.progress.loss, routes=routes)


def render_report(report: Report) -> RenderableType:
    """Return the tables."""
    job, progress = report.job, report.job.progress
    style = {"SUCCEEDED": "bold green", "FAILED": "bold red", "CANCELLED": "bold yellow"}.get(job.state, "bold")
    head = Text.assemble((f"{job.state}", style), f"  job {job.id} ({job.name})  ", job.message)
    numbers = (
        f"loss {_number(report.first_loss)} -> {_number(report.last_loss)}   steps {progress.step}/{progress.steps}"
        f"   skipped {progress.skipped_steps}   tokens {progress.tokens}"
        f"   tokens/s {_number(progress.tokens_per_second)}"
    )
    parts: list[RenderableType] = [head, Text(numbers)]
    parts += [Text(f"{error.pointer or '/'}: {error.message}", style="red") for error in job.errors]
    for group in job.rank_errors:
        ranks = ", ".join(str(rank) for rank in sorted(group.ranks, key=lambda rank: -1 if rank is None else rank))
        parts.append(Text(f"ranks {ranks}: {group.type}: {group.message}", style="red"))
    if report.routes is not None:
        parts.append(_route_table(report.routes))
        parts += [_rank_table(report.routes)] if report.routes.ranks else []
        parts += [_kernel_table(report.routes)] if report.routes.planned_ns_matrices is not None else []
        parts.append(_verdict(report.routes))
    return Group(*parts)


def _route_table(routes: r.RoutesResource) -> Table:
    table = _table("Routes", "route", "params", "elements", "moved", "planned", "comm s", "exposed s", "overlap")
    for route in routes.routes:
        cells = [route.route, str(route.parameters), _count(route.elements)]
        if route.payload_bytes is None:
            table.add_row(*cells, *"-----")
            continue
        planned = sum(part.planned_bytes or 0 for part in route.comm)
        cells += [_bytes(route.payload_bytes), _bytes(planned)]
        cells += [_seconds(route.comm_seconds), _seconds(route.exposed_seconds), _percent(route.overlap_ratio)]
        table.add_row(*cells)
    return table


def _rank_table(routes: r.RoutesResource) -> Table:
    table = _table("Ownership", "rank", "matrices", "planned share", "measured share", "compute s")
    for rank in routes.ranks:
        cells = (str(rank.rank), str(rank.planned_matrices), _percent(rank.planned_share))
        table.add_row(*cells, _percent(rank.measured_share), _seconds(rank.compute_seconds))
    return table


def _kernel_table(routes: r.RoutesResource) -> Table:
    table = _table("Newton-Schulz, as launched", "kernel", "algorithm", "launches", "matrices", "seconds")
    for entry in routes.ns:
        cells = (entry.kernel, entry.algorithm, str(entry.launches), str(entry.matrices), f"{entry.seconds:.3f}")
        table.add_row(*cells)
    return table


def _verdict(routes: r.RoutesResource) -> Text:
    if routes.planned_ns_matrices is None:
        return Text(f"optimizer {routes.optimizer}: a baseline of torch's code, where nothing is counted and verified")
    counted = f"matrices planned {routes.planned_ns_matrices}, counted {routes.ns_matrices}"
    found = routes.verification
    if found is None:
        return Text(f"{counted}; not verified: no step was reported by every rank", style="yellow")
    mark = "routes verified" if found.status == "True" else "NOT AS PLANNED"
    return Text(f"{counted}; {mark}: {found.message}", style="green" if found.status == "True" else "bold red")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _scaled(number: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < 1000:
            return f"{number:.4g} {unit}".rstrip()
        number /= 1000
    return f"{number:.4g} {units[-1]}"


def _count(number: float) -> str:
    return _scaled(number, ("", "k", "M", "G", "T"))


def _bytes(number: float) -> str:
    return _scaled(number, ("B", "kB", "MB", "GB", "TB"))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def render_plan(
    plan: r.PlanSummary,
    routes: Sequence[tuple[str, int, int]],
    traffic: Sequence[tuple[str, str, int]],
    cost: CostPlan | None = None,
) -> Group:
    """Return a plan's figures: routes as (name, parameters, elements), traffic as (route, phase, bytes a rank)."""
    head = (
        f"plan {plan.plan_hash}: {plan.world_size} workers, {plan.trainable_elements} trainable elements, "
        f"{plan.tokens_per_step} tokens a step"
    )
    if plan.ns_flops is not None and plan.predicted_imbalance is not None:
        head += f", {plan.ns_matrices} matrices a step ({plan.ns_flops:.3g} FLOPs)"
        head += f", imbalance {plan.predicted_imbalance:.3f}"
    parts: list[RenderableType] = [Text(head)]
    one = _table("Routes", "route", "parameters", "elements")
    for name, parameters, elements in routes:
        one.add_row(name, str(parameters), str(elements))
    parts.append(one)
    two = _table("Traffic of one rank in one step", "route", "phase", "bytes")
    for name, phase, number in traffic:
        two.add_row(name, phase, _bytes(number))
    parts += [two] if traffic else []
    parts += [] if cost is None else [Text(_cost_line(cost))]
    return Group(*parts, *(Text(f"warning: {text}", style="yellow") for text in plan.warnings))


def _cost_line(cost: CostPlan) -> str:
    """Return the predicted cost of a step in a few lines."""
    return (
        f"predicted on {cost.chip}: a step of {1e3 * cost.step_s:.1f} ms, {cost.overhead_ratio:+.1%} of "
        f"{1e3 * cost.adamw_step_s:.1f} ms with FSDP2 and AdamW\n"
        f"  update {1e3 * cost.update_s:.2f} ms, of it Newton-Schulz {1e3 * cost.ns_s:.2f} (mean over workers "
        f"{1e3 * cost.ns_mean_s:.2f}, largest matrix {1e3 * cost.largest_matrix_s:.2f}); AdamW's "
        f"{1e3 * cost.adamw_update_s:.2f}\n"
        f"  waiting for communication {1e3 * cost.exposed_s:.2f} ms; AdamW's {1e3 * cost.adamw_exposed_s:.2f}\n"
        f"  not measured but assumed: {', '.join(cost.assumed) or 'nothing'}"
    )
