"""The frame of a script that tells a story about a service of its own: up, the story, down, and how it ended."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks._watching import Gpus, Transcript, Violated, expect_free, scrape
from orchestrator.cli.own_service import OwnService
from orchestrator.client import Client
from orchestrator.errors import ServiceError

__all__ = ["expect_given_back", "running", "tell_story"]

S = TypeVar("S")


@contextmanager
def running(service: OwnService, told: Transcript) -> Iterator[Client]:
    """Run ``service``; show its jobs' events and the end of its log when the story fails, and expect that no process is
    left.

    Raises:
        Violated: a process of it was left.
    """
    try:
        with service, service.client() as client:
            told.say(f"the service is up: {service.url}")
            try:
                yield client
            except Violated:
                _show_events(client)
                raise
    except BaseException:
        print(f"--- the end of {service.log} ---\n{service.log_tail()}", file=sys.stderr)
        raise
    told.say()
    told.expect(not service.left, "the service and its Ray are down, no process is left", service.left or "")


def _show_events(client: Client) -> None:
    """Print what happened to each job, for whoever reads why the story failed."""
    try:
        for job in client.jobs().jobs:
            print(f"--- events of {job.name}", file=sys.stderr)
            for event in client.events(job.id).events:
                print(f"{event.kind}: {event.message}", file=sys.stderr)
    except ServiceError as error:
        print(f"--- no events: {error}", file=sys.stderr)


def expect_given_back(told: Transcript, url: str, idle: Gpus | None) -> None:
    """Expect that Ray has all its resources, and that the GPUs are as they were."""

    def amounts(amount: str) -> dict[tuple[str, ...], float]:
        return scrape(url).by("dmuon_cluster_resources", "resource", amount=amount)

    told.wait(lambda: amounts("free") == amounts("total") != {}, "Ray's resources are free", timeout_s=30)
    told.say(f"  ok    Ray has everything back ({ {key[0]: v for key, v in amounts('free').items()} })")
    expect_free(told, idle)


def tell_story(limit_s: float, tell: Callable[[Transcript, Path], S]) -> tuple[S, Transcript] | None:
    """Call ``tell`` with a transcript and a state directory, which then goes; None when something did not hold."""
    signal.signal(signal.SIGTERM, _stop)
    told = Transcript(time.monotonic() + limit_s)
    state_dir = Path(tempfile.mkdtemp(prefix="dmuon-story-"))
    try:
        story = tell(told, state_dir)
    except (Violated, ServiceError) as error:
        told.say(f"FAILED  {error}")
        return None
    finally:
        shutil.rmtree(state_dir, ignore_errors=True)
    told.say(f"everything held, in {time.monotonic() - told.began:.0f} s")
    return story, told


def _stop(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # what was started is being ended: once is enough
    raise Violated(f"expected: to run to the end; found: {signal.Signals(number).name}")
