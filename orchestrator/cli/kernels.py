"""The commands of kernels: which there are, their breakers, and swapping that of a running job."""

from __future__ import annotations

import time
import uuid
from typing import Annotated

import typer

from orchestrator import resources as r
from orchestrator.cli import _console as c
from orchestrator.client import Client
from worker.contract.kernels import Algorithm, CoefficientSet, Kernel, SwapState

__all__ = ["AsJson", "Url", "add_kernel_commands"]

Url = Annotated[str | None, typer.Option(help="Address of the service; by default the one of the state directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the document for a program.")]
Reason = Annotated[str, typer.Option(help="Why; it stands in every event.")]
Scope = Annotated[str, typer.Option(help="'all', or the id of a job.")]
Expires = Annotated[float | None, typer.Option("--expires-in", min=1.0, help="Seconds until it is closed again.")]
MustExpire = Annotated[float, typer.Option("--expires-in", min=1.0, help="Seconds until it may trip again.")]
_PAUSE_S = 0.3


def add_kernel_commands(app: typer.Typer) -> None:
    """Add them to ``app``."""
    for command in (kernels, breaker, trip, reset, force, disable, observe, swap):
        app.command()(command)


def kernels(url: Url = None, as_json: AsJson = False) -> None:
    """List kernels: which can run, and their breakers."""
    with c.connected(url) as client:
        found = client.kernels()
    if as_json:
        return c.print_json(found)
    for kernel in found.kernels:
        able = {True: "available", False: "unavailable", None: "unknown"}[kernel.available]
        c.console.print(f"{kernel.kernel:<10} {able:<12} {kernel.breaker or '-':<12} {kernel.detail}", markup=False)


def breaker(kernel: str, url: Url = None, as_json: AsJson = False) -> None:
    """Show a kernel's breaker: its state, what tripped by itself, and who said what of it."""
    with c.connected(url) as client:
        found = client.breaker(kernel)
    if as_json:
        return c.print_json(found)
    c.console.print(_line(found), markup=False)
    for moved in found.runtime:
        where = f"job {moved.job}, short sides up to {moved.size_class} in {moved.dtype}"
        c.console.print(f"  {where}: {moved.state} since step {moved.step}: {moved.reason}", markup=False)
    for word in found.history:
        c.console.print(
            f"  epoch {word.epoch}  {word.from_state} -> {word.to_state}  {word.scope}  {word.actor}: {word.reason}",
            markup=False,
        )


def trip(
    kernel: str, reason: Reason, scope: Scope = "all", expires_in: Expires = None, url: Url = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Send a kernel's work to the fallback, in running jobs too."""
    change = c.requested(r.BreakerChange, action="trip", reason=reason, scope=scope, expires_in_s=expires_in)
    _change(kernel, change, url, as_json)


def reset(kernel: str, reason: Reason, scope: Scope = "all", url: Url = None, as_json: AsJson = False) -> None:
    """Let a kernel run again, and trip again; what tripped by itself is closed."""
    _change(kernel, c.requested(r.BreakerChange, action="reset", reason=reason, scope=scope), url, as_json)


def force(
    kernel: str, reason: Reason, scope: Scope = "all", expires_in: Expires = None, url: Url = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Pin the fallback in place of a kernel."""
    change = c.requested(r.BreakerChange, action="force", reason=reason, scope=scope, expires_in_s=expires_in)
    _change(kernel, change, url, as_json)


def disable(
    kernel: str, reason: Reason, expires_in: MustExpire,
    scope: Scope = "all", url: Url = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Pin a kernel: its breaker does not trip, for a time that must be said."""
    change = c.requested(r.BreakerChange, action="disable", reason=reason, scope=scope, expires_in_s=expires_in)
    _change(kernel, change, url, as_json)


def observe(
    kernel: str, reason: Reason, scope: Scope = "all", expires_in: Expires = None, url: Url = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Count a kernel's failures without tripping on them."""
    change = c.requested(r.BreakerChange, action="observe", reason=reason, scope=scope, expires_in_s=expires_in)
    _change(kernel, change, url, as_json)


def _change(kernel: str, change: r.BreakerChange, url: str | None, as_json: bool) -> None:
    with c.connected(url) as client:
        found = client.change_breaker(kernel, change)
    if as_json:
        return c.print_json(found)
    c.console.print(_line(found), markup=False)


def _line(found: r.BreakerResource) -> str:
    parts = [f"{found.kernel}: {found.state} (epoch {found.epoch})"]
    parts += [f"job {job}: {state}" for job, state in found.jobs.items()]
    if found.reason:
        parts.append(f"{found.actor}: {found.reason}")
    return "  ".join(parts)


def swap(
    job_id: str,
    reason: Reason,
    kernel: Annotated[Kernel | None, typer.Option()] = None,
    algorithm: Annotated[Algorithm | None, typer.Option()] = None,
    coefficients: Annotated[CoefficientSet | None, typer.Option()] = None,
    wait_s: Annotated[float, typer.Option("--wait", min=0.0, help="Seconds to wait for the outcome.")] = 180.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Swap what a running job's Newton-Schulz is done with, on all ranks at one step. Exit code 1: it does not hold."""
    if kernel is None and algorithm is None and coefficients is None:
        raise typer.BadParameter("say --kernel, --algorithm or --coefficients")
    request = c.requested(r.SwapRequest, kernel=kernel, algorithm=algorithm, coefficients=coefficients, reason=reason)
    with c.connected(url) as client:
        found = _await(client, client.swap(job_id, request, key=uuid.uuid4().hex), wait_s)
    if as_json:
        c.print_json(found)
    else:
        where = "" if found.step is None else f" at step {found.step}, epoch {found.epoch}"
        c.console.print(f"swap {found.id} to {found.target}: {found.state}{where}  {found.message}", markup=False)
    if found.state is not SwapState.COMMITTED and (found.final or wait_s > 0):
        raise typer.Exit(c.FAILED)


def _await(client: Client, found: r.SwapResource, wait_s: float) -> r.SwapResource:
    deadline = time.monotonic() + wait_s
    while not found.final and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        found = client.swap_state(found.job, found.id)
    return found
