"""What was asked of the step and scaling benchmarks, with what was found beside it, and whether losses agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import print_table

__all__ = [
    "EXPOSED_SHARE",
    "LOSS_TOLERANCE",
    "Target",
    "exposed_share",
    "losses_apart",
    "print_exposed",
    "print_targets",
    "scaling_targets",
    "step_targets",
]

Row = Mapping[str, Any]
LOSS_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}
"""Largest relative difference between losses that should be equal: float32, and bfloat16 compute."""
OWNER_BALANCE, PUBLISH_SHARE, EXPOSED_SHARE = 1.08, 0.01, 0.02


@dataclass(frozen=True, slots=True)
class Target:
    """Something that was asked for, of one contestant; ``found`` is None where nothing was measured."""

    who: str
    what: str
    found: float | None
    limit: float
    adamw: float | None = None
    """The same of FSDP2 with AdamW and the same Z mode, where that was measured."""

    @property
    def verdict(self) -> str:
        """Say whether it was reached."""
        if self.found is None or math.isnan(self.found):
            return "not measured"
        return "met" if self.found <= self.limit else "missed"


def step_targets(workload: str, rows: Sequence[Row]) -> Iterator[Target]:
    """Yield the targets of a step on two H200s, for every row of ours."""
    adamw = {row["contestant"][-2:]: row for row in rows if row["contestant"].startswith("fsdp2 + adamw")}
    for row in rows:
        who, base = row["contestant"], adamw.get(row["contestant"][-2:])
        if not who.startswith("ours") or workload not in ("llama", "small-matrices"):
            continue
        yield Target(who, "step over AdamW's", row["over adamw"], 1.06 if workload == "llama" else 1.05)
        if workload == "llama":
            yield Target(who, "update ms", row["update ms"], 40.0)
            peak = None if base is None or row["peak GiB"] is None else row["peak GiB"] / base["peak GiB"]
            yield Target(who, "peak memory over AdamW's", peak, 1.0)
            exposed, how = exposed_share(row, "passes")
            peer = None if base is None else exposed_share(base, "passes")[0]
            yield Target(who, f"forward and backward exposed, share of the step, {how}", exposed, EXPOSED_SHARE, peer)


def scaling_targets(workload: str, world_size: int, rows: Sequence[Row]) -> Iterator[Target]:
    """Yield the targets of scaling that a world of this size can show, for every row of ours."""
    limit = {"llama-3.2-3b": 4.0, "llama-3.1-8b": 3.0}.get(workload) if world_size == 8 else None
    for row in rows:
        who = f"{row['layout']} {row['contestant']}"
        if not row["contestant"].startswith("ours"):
            continue
        if limit is not None:
            yield Target(who, "overhead over AdamW, %", row["overhead %"], limit)
        if world_size > 1:
            yield Target(who, "owners, measured max over mean", row["owner balance measured"], OWNER_BALANCE)
        if row["mesh"][0] > 1:
            exposed, how = exposed_share(row, "publish")
            yield Target(who, f"publishing exposed, share of the step, {how}", exposed, PUBLISH_SHARE)


def exposed_share(row: Row, of: str) -> tuple[float | None, str]:
    """Return what is exposed of the step ``of`` the passes or of publishing, and whether that was traced or counted.

    Counted it is only where steps were not traced, and of ours alone.
    """
    if row.get("exposed ms") is not None:
        return row["exposed ms"][of] / row["step ms"], "traced"
    return _counted_share(row, of), "counted"


def _counted_share(row: Row, of: str) -> float | None:
    counted = row.get("counted", row)
    if "exposed, share of the step" not in counted:
        return None
    key = "forward and backward exposed, share of the step"
    return float(counted[key] if of == "passes" else counted["exposed, share of the step"][of])


def print_exposed(rows: Sequence[Row]) -> None:
    """Print for how long compute stood still in a step because of communication, traced and, of ours, counted."""
    traced = ("whole", "forward", "backward", "update", "passes", "publish", "communication")
    print("compute stood still because of communication, ms a step, of the most exposed rank:")
    table = []
    for row in rows:
        seen = [None if row["exposed ms"] is None else row["exposed ms"][name] for name in traced]
        shares = [_counted_share(row, of) for of in ("passes", "publish")]
        table.append([_named(row), *seen, *(None if share is None else share * row["step ms"] for share in shares)])
    print_table(("", *traced, "passes, counted", "publish, counted"), table)


def print_targets(targets: Sequence[Target], of: str) -> None:
    """Print found, limit and verdict of each."""
    if targets:
        print(f"targets of {of}")
        rows = [(t.who, t.what, t.found, t.limit, t.verdict, t.adamw) for t in targets]
        print_table(("contestant", "target", "found", "at most", "", "AdamW's"), rows)


def losses_apart(rows: Sequence[Row], tolerance: float) -> list[str]:
    """Return where losses differ that should be equal, in words; nothing where all is well.

    All contestants begin with the same weights, so their first losses are the same; those of one optimizer are the same
    in all steps, however it is sharded: ours pure and hybrid, Z2 and Z3.
    """
    found: list[str] = []
    families: dict[str, Row] = {}
    for row in rows:
        name, losses = _named(row), row["first losses"]
        if not all(math.isfinite(loss) for loss in losses):
            found.append(f"{name}: {losses} are no losses")
            continue
        family = "ours" if row["contestant"].startswith("ours") else row["contestant"].removesuffix(" Z2")
        base = families.setdefault(family.removesuffix(" Z3"), row)
        pairs = [(rows[0], 1), (base, len(losses))]
        for other, number in pairs:
            apart = max(_apart(a, b) for a, b in zip(losses[:number], other["first losses"], strict=False))
            if not apart <= tolerance:
                steps = "step" if number == 1 else f"{number} steps"
                found.append(
                    f"{name}: the first {steps} differ from {_named(other)}'s by {apart:.2e}, more than {tolerance:g}: "
                    f"{losses} and {other['first losses']}"
                )
    return found


def _named(row: Row) -> str:
    return f"{row['layout']} {row['contestant']}" if "layout" in row else str(row["contestant"])


def _apart(one: float, other: float) -> float:
    return abs(one - other) / abs(other)
