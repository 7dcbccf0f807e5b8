"""Commands for who runs the service, and for whoever wonders about a job."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from orchestrator import resources as r
from orchestrator.cli import _console as c
from orchestrator.cli.cleaning import clean
from orchestrator.cli.kernels import AsJson, Url
from orchestrator.cli.logs import printable

__all__ = ["add_admin_commands"]


def add_admin_commands(app: typer.Typer) -> None:
    """Add ``explain``, ``checkpoints``, ``clean``, ``quota``, ``gpus`` and ``audit``."""
    for command in (explain, checkpoints, clean, quota, gpus, audit):
        app.command()(command)


def explain(job_id: str, url: Url = None, as_json: AsJson = False) -> None:
    """Say why a job waits, is slow, was restarted or has ended."""
    with c.connected(url) as client:
        found = client.explain(job_id)
    if as_json:
        return c.print_json(found)
    ahead = "" if found.ahead is None else f", {found.ahead} jobs before it"
    c.console.print(f"{found.state} since {_clock(found.since)}{ahead}", markup=False)
    if not found.causes:
        c.console.print(f"  {found.summary}", markup=False)
    for cause in found.causes:
        c.console.print(f"  {cause.code}: {cause.message}", markup=False)
        if cause.cure:
            c.console.print(f"    {cause.cure}", markup=False)


def checkpoints(job_id: str, url: Url = None, as_json: AsJson = False) -> None:
    """List what a job has saved."""
    with c.connected(url) as client:
        found = client.checkpoints(job_id)
    if as_json:
        return c.print_json(found)
    if not found.checkpoints:
        c.errors.print(f"job {job_id} has saved nothing", markup=False)
    for entry in found.checkpoints:
        there = {True: "", False: "  (removed since)", None: "  (not seen from here)"}[entry.present]
        c.console.print(
            f"step {entry.step}  {_clock(entry.at)}  {entry.bytes} bytes  {entry.path}{there}", markup=False
        )


def quota(
    project: Annotated[str | None, typer.Argument(help="Set that of this project; '*' is every other.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0)] = None,
    gpus: Annotated[float | None, typer.Option(min=0)] = None,
    memory_bytes: Annotated[int | None, typer.Option(min=0)] = None,
    jobs: Annotated[int | None, typer.Option(min=0, help="Jobs that run at once.")] = None,
    waiting_jobs: Annotated[int | None, typer.Option(min=0, help="Jobs that wait; one more is refused.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what projects may use at once and use; with a project, set it. A bound that is left out is none."""
    with c.connected(url) as client:
        if project is not None:
            change = c.requested(
                r.QuotaChange, cpus=cpus, gpus=gpus, memory_bytes=memory_bytes, jobs=jobs, waiting_jobs=waiting_jobs
            )
            client.set_quota(project, change)
        found = client.quotas()
    if as_json:
        return c.print_json(found)
    if not found.quotas:
        c.errors.print("no project has a quota: every one may use all there is")
    names = ("cpus", "gpus", "memory_bytes", "jobs", "waiting_jobs")
    for row in found.quotas:
        bounds = ", ".join(f"{name} {value:g}" for name in names if (value := getattr(row, name)) is not None)
        c.console.print(f"{row.project:<20} may use {bounds or 'all there is'}", markup=False)
    for name, used in found.used.items():
        text = f"{used.cpus:g} CPUs, {used.gpus:g} GPUs in {used.jobs} jobs"
        c.console.print(f"{name:<20} uses {text}", markup=False)


def gpus(
    everybody: Annotated[bool, typer.Option("--all", help="Also processes of attempts that live.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List processes that hold a GPU and belong to no attempt that lives, and nodes that could not be seen."""
    with c.connected(url) as client:
        found = client.gpus()
    if as_json:
        return c.print_json(found)
    if found.at is None:
        return c.errors.print("nobody knows: the cluster could not be asked, or not yet")
    unseen = [node for node in found.nodes if node.problem]
    number = len(found.nodes)
    c.console.print(f"{_clock(found.at)}  nodes with GPUs: {number}, seen: {number - len(unseen)}", markup=False)
    for node in unseen:
        c.console.print(f"{node.node}  NOT SEEN: {node.problem}", markup=False)
    shown = [holder for holder in found.holders if everybody or holder.standing != "live"]
    for holder in shown:
        c.console.print(_holder(holder), markup=False, soft_wrap=True)
    if not shown and any(node.gpus for node in found.nodes):
        where = ", on the GPUs that were seen" if unseen else ""
        c.errors.print(f"no process was seen that belongs to no attempt{where}")


def _holder(holder: r.GpuHolder) -> str:
    size = "?" if holder.bytes is None else f"{holder.bytes / 2**30:.2f}"
    since = "" if holder.started_at is None else f"  since {_clock(holder.started_at)}"
    process = f"process {holder.pid}" if holder.pid else "no process"
    who = f"  {holder.user}{since}  {printable(holder.command)}" if holder.command else ""
    place = f"{holder.node}  GPU {holder.gpu}  {process}  {size} GiB{who}"
    return f"{place}\n  {holder.standing}: {holder.why}"


def audit(
    target: Annotated[str | None, typer.Option(help="Only what was to change this job, kernel or project.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed what, newest first."""
    with c.connected(url) as client:
        found = client.audit(target=target)
    if as_json:
        return c.print_json(found)
    if not found.entries:
        c.errors.print("nothing was changed yet")
    for entry in found.entries:
        c.console.print(f"{_clock(entry.at)}  {entry.actor}  {entry.action}  {entry.outcome}", markup=False)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
