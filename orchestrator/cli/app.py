"""The commands."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orchestrator import resources as r
from orchestrator.cli import _console as c
from orchestrator.cli.admin import add_admin_commands
from orchestrator.cli.demo import run_demo
from orchestrator.cli.follow import follow
from orchestrator.cli.kernels import AsJson, Url, add_kernel_commands
from orchestrator.cli.logs import Wanted, show_logs
from orchestrator.cli.report import collect_report, render_plan, render_report
from orchestrator.cli.serving import down as end_service
from orchestrator.cli.serving import up as run_service
from orchestrator.client import Client, StreamEnd
from orchestrator.settings import Settings

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=True, help="Submit, watch and steer training jobs.")
add_kernel_commands(app)
add_admin_commands(app)
SpecFile = Annotated[Path, typer.Argument(help="Job spec, YAML or JSON.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Stay until the end.")]


_PAGE = 200
"""Jobs asked for at once; a list is read to its end."""


@app.command()
def up(
    host: Annotated[str | None, typer.Option()] = None,
    port: Annotated[int | None, typer.Option()] = None,
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray instead of starting one.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs that the started Ray offers.")] = None,
) -> None:
    """Serve in the foreground, with a Ray of its own that outlives the server."""
    with c.failures():
        settings = Settings.from_environment(host=host, port=port, ray_address=ray_address)
        run_service(settings, num_cpus=num_cpus)


@app.command()
def down() -> None:
    """End the server and its Ray, and check that nothing of them is left."""
    with c.failures():
        left = end_service(Settings.from_environment())
    if left:
        c.console.print(f"these processes would not end: {left}", style="red")
        raise typer.Exit(c.FAILED)
    c.console.print("down; nothing is left running")


Chip = Annotated[str | None, typer.Option(help="Predict the cost of a step on it, such as nvidia-h200.")]


@app.command()
def plan(spec: SpecFile, url: Url = None, as_json: AsJson = False, chip: Chip = None) -> None:
    """Say what a job would do, without running it."""
    text = c.read_file(spec)
    with c.connected(url) as client:
        report = client.plan(text, chip=chip)
    if as_json:
        return c.print_json(report)
    summary = r.PlanSummary.model_validate(report.model_dump())
    routes = [(entry.route, entry.parameters, entry.elements) for entry in report.routes]
    traffic = [(t.route, t.phase, t.payload_bytes) for t in report.traffic]
    c.console.print(render_plan(summary, routes, traffic, report.cost))


@app.command()
def submit(
    spec: SpecFile,
    following: Follow = False,
    expected_plan_hash: Annotated[str | None, typer.Option()] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job."""
    text = c.read_file(spec)
    with c.connected(url) as client:
        job = client.submit(text, key=uuid.uuid4().hex, expected_plan_hash=expected_plan_hash)
        if as_json and not following:
            return c.print_json(job)
        if not as_json:
            c.console.print(f"job {job.id} ({job.name}) was submitted", markup=False)
        if not following:
            return
        shown = Console(stderr=True, highlight=False) if as_json else c.console
        hint = f"Come back with: dmuonctl get {job.id} --follow"
        try:
            job = follow(client, job.id, shown, detach_hint=hint)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        finally:
            if as_json:
                c.print_json(job)
    raise typer.Exit(0 if job.state == "SUCCEEDED" else c.FAILED)


@app.command("list")
def listing(
    state: Annotated[str | None, typer.Option()] = None,
    project: Annotated[str | None, typer.Option()] = None,
    label: Annotated[str | None, typer.Option(help="key=value")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with c.connected(url) as client:
        jobs = tuple(_all_jobs(client, state=state, project=project, label=label))
    if as_json:
        return c.print_json(r.JobPage(jobs=jobs))
    if not jobs:
        filtered = any(value is not None for value in (state, project, label))
        c.errors.print(
            "no job matches these filters" if filtered else "there are no jobs; 'dmuonctl submit SPEC' adds one"
        )
    for job in jobs:
        c.console.print(f"{job.id}  {job.state:<10} {job.project}/{job.name}  {job.message}", markup=False)


def _all_jobs(client: Client, **filters: str | None) -> Iterator[r.JobSummary]:
    token: str | None = None
    while True:
        page = client.jobs(**filters, page_size=_PAGE, page_token=token)
        yield from page.jobs
        token = page.next_page_token
        if token is None:
            return


@app.command()
def get(job_id: str, following: Follow = False, url: Url = None, as_json: AsJson = False) -> None:
    """Show a job."""
    with c.connected(url) as client:
        if following:
            hint = f"Come back with: dmuonctl get {job_id} --follow"
            try:
                job = follow(client, job_id, c.console, detach_hint=hint)
            except KeyboardInterrupt:
                raise typer.Exit(0) from None
            raise typer.Exit(0 if job.state == "SUCCEEDED" else c.FAILED)
        job = client.job(job_id)
    if as_json:
        return c.print_json(job)
    c.console.print(f"{job.id}  {job.state}  {job.project}/{job.name}  {job.message}", markup=False)
    for condition in job.conditions:
        c.console.print(
            f"  {condition.type}={condition.status} ({condition.reason}): {condition.message}", markup=False
        )


@app.command()
def report(job_id: str, url: Url = None, as_json: AsJson = False) -> None:
    """Print the closing table of a job."""
    with c.connected(url) as client:
        found = collect_report(client, job_id)
    if as_json:
        return c.print_json(found)
    c.console.print(render_report(found))


@app.command()
def events(job_id: str, following: Follow = False, url: Url = None, as_json: AsJson = False) -> None:
    """Print a job's events, with --follow until it ends. --json prints one document, with --follow one a line."""
    with c.connected(url) as client:
        if as_json and not following:
            found = tuple(_all_events(client, job_id))
            return c.print_json(r.EventPage(events=found, next_after=found[-1].seq if found else 0))
        for item in client.stream(job_id) if following else _all_events(client, job_id):
            if as_json:
                typer.echo(item.model_dump_json())
            elif isinstance(item, StreamEnd):
                c.console.print(f"end: {item.state or ''} {item.reason or ''}", markup=False)
            else:
                c.console.print(f"{item.seq:>5}  {item.kind}: {item.message}", markup=False)


def _all_events(client: Client, job_id: str) -> Iterator[r.EventResource]:
    after = 0
    while True:
        page = client.events(job_id, after=after)
        if not page.events:
            return
        yield from page.events
        after = page.next_after


@app.command()
def ranks(job_id: str, url: Url = None, as_json: AsJson = False) -> None:
    """Show each rank of a job, and which of them the others wait for."""
    with c.connected(url) as client:
        found = client.ranks(job_id)
    if as_json:
        return c.print_json(found)
    if not found.ranks:
        c.console.print(f"job {job_id}: no rank has reported a step yet", markup=False)
    for rank in found.ranks:
        pace = "" if rank.own_seconds is None else f"  own {rank.own_seconds:.4f} s  waited {rank.waited_seconds:.4f} s"
        slow = "" if rank.slowdown_ratio is None else f"  {rank.slowdown_ratio:.2f} of the median"
        c.console.print(f"rank {rank.rank}  step {rank.step}{pace}{slow}", markup=False)


@app.command()
def logs(
    job_id: str,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it is written, to the end.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="One rank; else all.")] = None,
    stream: Annotated[str | None, typer.Option(help="stdout or stderr; else both.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Default: the last; with --follow the first.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print what the ranks wrote. --json prints a line of JSON for each line."""
    with c.connected(url) as client:
        show_logs(
            client, job_id, Wanted(attempt=attempt, rank=rank, stream=stream), following=following, as_json=as_json
        )


@app.command()
def cancel(job_id: str, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a job: it saves a checkpoint first, for as long as its spec allows."""
    with c.connected(url) as client:
        _show_state(client.cancel(job_id), as_json)


@app.command()
def pause(job_id: str, url: Url = None, as_json: AsJson = False) -> None:
    """Pause a job: it saves a checkpoint and releases what it holds."""
    with c.connected(url) as client:
        _show_state(client.pause(job_id), as_json)


@app.command()
def resume(job_id: str, url: Url = None, as_json: AsJson = False) -> None:
    """Continue a paused job from its checkpoint."""
    with c.connected(url) as client:
        _show_state(client.resume(job_id), as_json)


def _show_state(job: r.JobResource, as_json: bool) -> None:
    if as_json:
        return c.print_json(job)
    c.console.print(f"job {job.id} is {job.state}", markup=False)


@app.command()
def run(spec: SpecFile) -> None:
    """Run a job here, without a server."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", "worker", "run", str(spec)]))


@app.command()
def compare(
    specs: Annotated[list[Path], typer.Argument(help="Job specs, or files with a base spec and variants of it.")],
    out: Annotated[Path, typer.Option(help="Directory for compare.csv, compare.json and compare.png.")] = Path(
        "compare"
    ),
    allow_different_data: Annotated[bool, typer.Option(help="Compare although data, seed or batch differ.")] = False,
    plot: Annotated[bool, typer.Option(help="Draw the picture.")] = True,
) -> None:
    """Run several specs on the same data here, one after the other, and compare their losses."""
    from orchestrator.cli.compare import Request
    from orchestrator.cli.compare import compare as run_comparison

    request = Request(tuple(specs), out, allow_different_data, plot)
    raise typer.Exit(run_comparison(request, c.console, c.errors))


@app.command()
def demo(
    spec: SpecFile,
    num_cpus: Annotated[int | None, typer.Option()] = None,
    timeout_s: Annotated[float, typer.Option()] = 900.0,
) -> None:
    """Bring up a service of its own, run one job from end to end, and clean up."""
    c.read_file(spec)
    with c.failures():
        raise typer.Exit(run_demo(spec, c.console, num_cpus=num_cpus, timeout_s=timeout_s))


@app.command("version")
def show_version(as_json: AsJson = False) -> None:
    """Print the version."""
    try:
        found = version("dmuon-service")
    except PackageNotFoundError:
        found = "unknown"
    typer.echo(json.dumps({"version": found}) if as_json else found)


def main() -> None:
    """Entry point of ``dmuonctl``."""
    app()
