"""What the commands share: the console, the service's address, and what an error looks like."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console

from orchestrator.client import Client
from orchestrator.errors import RequestRefused, ServiceError, SettingsInvalid
from orchestrator.processes import ProcessRecord
from orchestrator.settings import Settings

__all__ = [
    "BAD_INPUT", "FAILED", "connected", "console", "errors", "failures", "print_json", "read_file", "requested",
    "server_record_path",
]  # fmt: skip

Asked = TypeVar("Asked", bound=BaseModel)
FAILED, BAD_INPUT = 1, 2
_WIDTH = 120
"""Columns of what goes to a file or a pipe, which have no width of their own."""
console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
errors = Console(stderr=True, highlight=False)


@contextmanager
def failures() -> Iterator[None]:
    """Print an error of the service as a message and end with the code that belongs to it."""
    try:
        yield
    except RequestRefused as error:
        errors.print(str(error), style="red", markup=False)
        raise typer.Exit(BAD_INPUT if 400 <= error.problem.status < 500 else FAILED) from None
    except SettingsInvalid as error:
        errors.print(str(error), style="red", markup=False)
        raise typer.Exit(BAD_INPUT) from None
    except ServiceError as error:
        errors.print(f"{error.title}: {error}", style="red", markup=False)
        raise typer.Exit(FAILED) from None


def server_record_path(settings: Settings) -> Path:
    """Return where a running server says where it is."""
    return settings.state_dir / "server.json"


@contextmanager
def connected(url: str | None) -> Iterator[Client]:
    """Yield a client of the service at ``url``, or of the one of this state directory."""
    with failures():
        settings = Settings.from_environment()
        record = ProcessRecord.load(server_record_path(settings))
        where = url or (record.address if record else f"http://{settings.host}:{settings.port}")
        words = settings.token_file.read_text().split() if settings.token_file.exists() else []
        token = words[0] if words else None
        with Client(where, token) as client:
            yield client


def requested(kind: type[Asked], **fields: object) -> Asked:
    """Return a request made of options; ends with code 2, naming each that is not allowed."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        for wrong in error.errors():
            option = "--" + "-".join(map(str, wrong["loc"])).removesuffix("_s").replace("_", "-")
            errors.print(f"{option}: {wrong['msg']}, found {str(wrong['input'])[:80]!r}", style="red", markup=False)
        raise typer.Exit(BAD_INPUT) from None


def read_file(path: Path) -> str:
    """Return the text of a file that the user named; ends with code 2 when it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        errors.print(f"{path} cannot be read: {error}", style="red", markup=False)
        raise typer.Exit(BAD_INPUT) from None


def print_json(model: BaseModel) -> None:
    """Print a document for a program."""
    typer.echo(model.model_dump_json(indent=2))
