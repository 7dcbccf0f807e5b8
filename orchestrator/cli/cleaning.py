"""``clean``: checkpoints of jobs that ended long ago. The service itself removes no weights."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import _console as c
from orchestrator.cli.kernels import Url
from orchestrator.client import Client
from orchestrator.errors import RequestRefused
from orchestrator.settings import Settings

__all__ = ["clean"]

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The checkpoints of one job in the state directory."""

    folder: Path
    num_bytes: int
    state: str
    """What keeps them or gives them free."""
    free: bool


def clean(
    older_than_days: Annotated[float, typer.Option(min=0, help="Since the job ended.")] = 30.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only listed.")] = False,
    url: Url = None,
) -> None:
    """List, and with --yes remove, checkpoints of jobs that ended long ago, on the machine of the state directory.

    Only those that jobs keep in a place of their own there: what a spec named under /checkpoint/directory is its
    owner's. Checkpoints of a job that has not ended, or that this service does not know, are left alone.
    """
    with c.connected(url) as client:
        root = Settings.from_environment().state_dir / "checkpoints"
        folders = sorted(root.iterdir()) if root.is_dir() else []
        kept = [_look(client, folder, older_than_days) for folder in folders if folder.is_dir()]
    for entry in kept:
        word = "left alone" if not entry.free else "removed" if yes else "would be removed"
        if entry.free and yes:
            shutil.rmtree(entry.folder)
        c.console.print(f"{entry.folder.name}  {entry.num_bytes} bytes  {entry.state}: {word}", markup=False)
    total = sum(entry.num_bytes for entry in kept if entry.free)
    if not total:
        c.errors.print(f"no job that ended {older_than_days:g} days ago has checkpoints in {root}", markup=False)
    elif not yes:
        c.errors.print(f"{total} bytes can be freed: say --yes. A spec may name one of them under /checkpoint/resume.")


def _look(client: Client, folder: Path, older_than_days: float) -> _Kept:
    num_bytes = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    try:
        job = client.job(folder.name)
    except RequestRefused as error:
        if error.problem.status != 404:
            raise
        return _Kept(folder=folder, num_bytes=num_bytes, state="of no job of this service", free=False)
    if folder.is_symlink() or not job.terminal or job.finished_at is None:
        return _Kept(folder=folder, num_bytes=num_bytes, state=job.state, free=False)
    days = (time.time() - job.finished_at) / _DAY_S
    state = f"{job.state} {days:.1f} days ago"
    return _Kept(folder=folder, num_bytes=num_bytes, state=state, free=days >= older_than_days)
