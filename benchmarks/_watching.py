"""What the end-to-end scripts see with and say: GPUs by nvidia-smi, the service's /metrics, a transcript with laws."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

SLACK_BYTES = 256 << 20
"""By which the memory of a GPU may differ from what it was before: the driver keeps some."""

__all__ = [
    "SLACK_BYTES",
    "Gpus",
    "Scrape",
    "Transcript",
    "Violated",
    "expect_free",
    "expect_in_use",
    "gpus_now",
    "overlap_rows",
    "scrape",
]


class Violated(RuntimeError):
    """Something that had to hold did not."""


@dataclass(slots=True)
class Transcript:
    """What is printed and kept; :meth:`expect` is the only way to claim that something holds."""

    deadline: float
    """Monotonic time after which every wait is given up."""
    lines: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str = "") -> None:
        """Print and keep a line, with the seconds since the start."""
        line = f"{time.monotonic() - self.began:6.1f} s  {text}" if text else ""
        print(line, flush=True)
        self.lines.append(line)

    def table(self, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
        """Print and keep an aligned table."""
        text = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in (header, *rows)]
        widths = [max(len(row[column]) for row in text) for column in range(len(header))]
        for row in text:
            line = " " * 10 + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            print(line, flush=True)
            self.lines.append(line)

    def expect(self, holds: bool, law: str, found: object = "") -> None:
        """Say that ``law`` holds.

        Raises:
            Violated: it does not; with what was found.
        """
        if not holds:
            raise Violated(f"expected: {law}; found: {found}")
        self.say(f"  ok    {law}" + (f" ({found})" if found != "" else ""))

    def wait(self, condition: Callable[[], bool], what: str, *, timeout_s: float, pause_s: float = 0.3) -> None:
        """Look again and again until ``condition`` holds.

        Raises:
            Violated: not within ``timeout_s``, or not before the deadline of the whole.
        """
        end = min(time.monotonic() + timeout_s, self.deadline)
        while not condition():
            if time.monotonic() > end:
                late = "the deadline of the whole script" if end == self.deadline else f"{timeout_s:g} s"
                raise Violated(f"expected: {what}; found: not so after {late}")
            time.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class Gpus:
    """What nvidia-smi says: bytes in use by GPU, and the processes that compute."""

    used_bytes: Mapping[int, int]
    processes: frozenset[str]


def gpus_now() -> Gpus:
    """Ask nvidia-smi.

    Raises:
        Violated: it cannot be asked.
    """
    used = {}
    for line in _smi("--query-gpu=index,memory.used"):
        index, mebibytes = line.split(",")
        used[int(index)] = int(mebibytes) << 20
    return Gpus(used, frozenset(_smi("--query-compute-apps=gpu_uuid,pid")))


def _smi(query: str) -> list[str]:
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Violated(f"expected: nvidia-smi answers; found: {error}") from error
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def expect_in_use(told: Transcript, idle: Gpus | None, gpus: int) -> dict[int, int] | None:
    """Expect that so many GPUs hold a model; return their bytes above idle, None on CPUs."""
    if idle is None:
        return None
    grown = {index: used - idle.used_bytes[index] for index, used in gpus_now().used_bytes.items()}
    held = {index: number for index, number in grown.items() if number > SLACK_BYTES}
    text = ", ".join(f"GPU {index}: {number / 2**30:.1f} GiB" for index, number in held.items())
    told.expect(len(held) == gpus, f"{gpus} GPUs are in use", text or "none")
    return held


def expect_free(told: Transcript, idle: Gpus | None) -> None:
    """Expect that no process computes on a GPU that did not before, and that memory is back."""
    if idle is None:
        return
    seen = [idle]

    def free() -> bool:
        seen[0] = gpus_now()
        back = all(used - idle.used_bytes[index] < SLACK_BYTES for index, used in seen[0].used_bytes.items())
        return back and seen[0].processes <= idle.processes

    try:
        told.wait(free, "GPUs are free", timeout_s=30)
    except Violated as error:
        raise Violated(f"{error}: {seen[0]}, before it was {idle}") from None
    used = ", ".join(f"GPU {index}: {number >> 20} MiB" for index, number in seen[0].used_bytes.items())
    told.say(f"  ok    no process of ours is on a GPU and memory is back ({used})")


Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One look at /metrics: value by name and labels."""

    values: Mapping[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all series of ``name`` that have ``labels``; 0 where there is none."""
        wanted = set(labels.items())
        return sum(value for (key, found), value in self.values.items() if key == name and wanted <= found)

    def by(self, name: str, *keys: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Return the sums of ``name`` by the values of ``keys``, over the series that have ``labels``."""
        wanted = set(labels.items())
        sums: dict[tuple[str, ...], float] = {}
        for (found_name, found), value in self.values.items():
            if found_name == name and wanted <= found:
                at = tuple(dict(found)[key] for key in keys)
                sums[at] = sums.get(at, 0.0) + value
        return sums


def scrape(url: str) -> Scrape:
    """Read ``url``/metrics as Prometheus would."""
    answer = httpx.get(f"{url}/metrics", trust_env=False, timeout=30.0)
    answer.raise_for_status()
    values = {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    return Scrape(values)


def overlap_rows(before: Scrape, after: Scrape, job: str) -> list[dict[str, object]]:
    """Return communication between two scrapes by route and phase: collectives, bytes, seconds, and what was hidden."""
    rows: list[dict[str, object]] = []

    def grown(name: str) -> dict[tuple[str, ...], float]:
        earlier = before.by(name, "route", "phase", job=job)
        return {key: value - earlier.get(key, 0.0) for key, value in after.by(name, "route", "phase", job=job).items()}

    seconds, exposed = grown("dmuon_comm_seconds_total"), grown("dmuon_comm_exposed_seconds_total")
    moved, calls = grown("dmuon_comm_bytes_total"), grown("dmuon_comm_collectives_total")
    for key in sorted(seconds):
        rows.append(
            {
                "route": key[0],
                "phase": key[1],
                "collectives": int(calls[key]),
                "bytes": int(moved[key]),
                "seconds": seconds[key],
                "exposed seconds": exposed[key],
                "overlap": 1 - exposed[key] / seconds[key] if seconds[key] > 0 else None,
            }
        )
    return rows
