"""Following a job: a bar of progress until it ends, then the closing table."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from orchestrator import resources as r
from orchestrator.cli.report import collect_report, render_report
from orchestrator.client import Client
from orchestrator.errors import FollowTimeout

__all__ = ["follow"]

_PAUSE_S = 0.4
_QUIET = ("submitted", "state", "rank_error")
"""Kinds that the bar or the closing table shows anyway."""


def follow(
    client: Client, job_id: str, console: Console, *, detach_hint: str, deadline: float = math.inf
) -> r.JobResource:
    """Show a job until it ends and print the closing table; Ctrl-C detaches and leaves the job alone.

    Args:
        deadline: monotonic time after which waiting is given up.

    Raises:
        KeyboardInterrupt: the user detached; the hint was printed.
        FollowTimeout: the deadline passed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
            task = bar.add_task("SUBMITTED", total=1, text="")
            job = _watch(client, job_id, bar, task, deadline)
    except KeyboardInterrupt:
        console.print(f"\nDetached; the job goes on. {detach_hint}", markup=False)
        raise
    console.print(render_report(collect_report(client, job_id)))
    return job


def _watch(client: Client, job_id: str, bar: Progress, task: TaskID, deadline: float) -> r.JobResource:
    cursor = 0
    while True:
        job = client.job(job_id)
        page = client.events(job_id, after=cursor)
        cursor = page.next_after
        for event in page.events:
            if _is_news(event):
                bar.console.print(f"  {event.kind}: {event.message}", markup=False)
        progress = job.progress
        bar.update(task, description=job.state, total=progress.steps, completed=progress.step, text=_line(progress))
        if job.terminal:
            return job
        if time.monotonic() > deadline:
            raise FollowTimeout(f"job {job_id} is still {job.state} ({job.message or 'no reason is known'})")
        time.sleep(_PAUSE_S)


def _is_news(event: r.EventResource) -> bool:
    """False for what the bar or another event says as well: of conditions, those that came true as they should."""
    if event.kind == "routes_verified":
        return event.data.get("ok") is False  # the condition of the same name has all ranks' figures
    if event.kind == "condition" and event.data.get("status") == "True":
        return event.data.get("type") in ("RoutesVerified", "Planned")
    return event.kind not in _QUIET


def _line(progress: r.Progress) -> str:
    parts = [f"step {progress.step}/{progress.steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:.0f} tokens/s")
    if progress.overlap_ratio is not None:
        parts.append(f"overlap {100 * progress.overlap_ratio:.0f}%")
    return "  ".join(parts)
