"""Runs one variant without a server, as ``dmuonctl run`` does, and keeps what its workers report."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from orchestrator.compare.variants import Variant
from worker.contract.messages import Milestone, RankError, RankReport
from worker.contract.spec import JobSpec

__all__ = ["Point", "VariantResult", "run_variant"]

_BODY: TypeAdapter[RankReport | Milestone | RankError] = TypeAdapter(
    Annotated[RankReport | Milestone | RankError, Field(discriminator="kind")]
)
_ENDS: dict[int, Literal["completed", "refused", "stopped"]] = {0: "completed", 2: "refused", 130: "stopped"}
_TAIL = 2000
"""Characters of the end of a failed run's errors that are kept."""


class Document(BaseModel):
    """Base: frozen, NaN and infinity written as text, which JSON has no numbers for."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Point(Document):
    """One optimizer step, after all workers reported it."""

    step: int
    tokens: int
    """Read by all workers so far."""
    seconds: float
    """In steps so far, on rank 0: without starting, and without what happens between steps."""
    loss: float
    """Mean over the global batch, in nats a token."""
    grad_norm: float | None
    skipped: bool


class VariantResult(Document):
    """A run and how it ended."""

    name: str
    spec: JobSpec
    end: Literal["completed", "refused", "stopped", "failed"]
    message: str
    """The end of what the run wrote to standard error."""
    kernels: tuple[str, ...]
    """Newton-Schulz kernels that the runtime launched; empty for a baseline."""
    points: tuple[Point, ...]


class _Gatherer:
    """Puts the reports of all ranks for one step together."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._waiting: dict[int, list[RankReport]] = {}
        self.points: list[Point] = []
        self.kernels: set[str] = set()

    def take(self, report: RankReport) -> Point | None:
        """Return the point that this report completes, or None."""
        self.kernels |= {str(entry.kernel) for entry in report.ns}
        reports = self._waiting.setdefault(report.step, [])
        reports.append(report)
        if len(reports) < self._num_ranks:
            return None
        del self._waiting[report.step]
        lead = min(reports, key=lambda each: each.rank)
        point = Point(
            step=lead.step,
            tokens=sum(each.tokens_total for each in reports),
            seconds=lead.step_seconds_sum,
            loss=lead.loss,
            grad_norm=lead.grad_norm,
            skipped=lead.skipped,
        )
        self.points.append(point)
        return point


def run_variant(variant: Variant, on_point: Callable[[Point], None]) -> VariantResult:
    """Run ``variant`` to its end in a process of its own; ``on_point`` is called in this thread after every step.

    Ctrl-C stops it after the step in progress; a second one at once. It never raises for a run that fails.
    """
    gathered = _Gatherer(variant.spec.world_size)
    with tempfile.TemporaryDirectory(prefix="dmuon-compare-") as folder:
        spec, errors = Path(folder) / "spec.json", Path(folder) / "stderr"
        spec.write_text(variant.spec.model_dump_json())
        with _started(spec, errors) as process:
            for line in _lines(process):
                body = _BODY.validate_json(line)
                point = gathered.take(body) if isinstance(body, RankReport) else None
                if point is not None:
                    on_point(point)
            code = process.wait()
        message = errors.read_text(errors="replace")[-_TAIL:].strip()
    return VariantResult(
        name=variant.name,
        spec=variant.spec,
        end=_ENDS.get(code, "failed"),
        message=message,
        kernels=tuple(sorted(gathered.kernels)),
        points=tuple(sorted(gathered.points, key=lambda point: point.step)),
    )


@contextmanager
def _started(spec: Path, errors: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the run in a session of its own, so that an interrupt reaches it once, from here; leave none behind."""
    command = [sys.executable, "-m", "worker", "run", str(spec), "--json"]
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield what the run says; the first interrupt is handed on, the second is raised."""
    interrupted = False
    assert process.stdout is not None
    while True:
        try:
            line = process.stdout.readline()
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            process.send_signal(signal.SIGINT)
            continue
        if not line:
            return
        yield line
