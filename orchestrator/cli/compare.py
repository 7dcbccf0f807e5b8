"""``dmuonctl compare``: plan all runs, run them one after the other, and write what came of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from orchestrator.cli._console import BAD_INPUT, FAILED
from orchestrator.compare.plot import can_plot, plot_comparison
from orchestrator.compare.results import Comparison, render_comparison, write_csv
from orchestrator.compare.run import Point, VariantResult, run_variant
from orchestrator.compare.variants import Variant, different_data, read_variants
from orchestrator.errors import ComparisonInvalid, PlannerFailed, PlanRefusedProblem
from orchestrator.planner import ProcessPlanner
from worker.contract.errors import FieldError

__all__ = ["Request", "compare"]

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Request:
    """What the command was asked for."""

    files: tuple[Path, ...]
    out: Path
    allow_different_data: bool
    plot: bool


def compare(request: Request, console: Console, errors: Console) -> int:
    """Do it and return the exit code: 0, 1 when a run failed, 2 when nothing was run, 130 after Ctrl-C.

    Results are written whatever became of the runs, as soon as the last of them has ended.
    """
    try:
        variants = _checked(request)
    except ComparisonInvalid as error:
        for entry in error.errors:
            errors.print(str(entry), style="red", markup=False)
        return BAD_INPUT
    except (OSError, PlannerFailed) as error:
        errors.print(f"{error}", style="red", markup=False)
        return BAD_INPUT if isinstance(error, OSError) else FAILED
    differences = tuple(f"{entry.pointer}: {entry.message}" for entry in different_data(variants))
    comparison = Comparison(variants=tuple(_run_all(variants, console)), differences=differences)
    _write(comparison, request, console)
    for result in comparison.variants:
        if result.end != "completed":
            errors.print(f"{result.name}: {result.end}\n{result.message}", style="red", markup=False)
    ends = {result.end for result in comparison.variants}
    return _INTERRUPTED if "stopped" in ends else FAILED if ends != {"completed"} else 0


def _checked(request: Request) -> list[Variant]:
    """Return runs that can be compared and planned; every refusal comes before the first step.

    Raises:
        ComparisonInvalid: with all reasons.
        PlannerFailed: the planner itself failed.
    """
    variants = read_variants(request.files)
    mistakes = [] if request.allow_different_data else different_data(variants)
    if mistakes:
        cure = "Losses on other data say nothing about the optimizer. Make them equal, or pass --allow-different-data."
        mistakes.append(FieldError(pointer="", code="not_comparable", message="nothing was run.", suggestion=cure))
    if request.plot and not can_plot():
        cure = "Install dmuon-service[plot], or pass --no-plot."
        message = "matplotlib is not installed, which draws the picture."
        mistakes.append(FieldError(pointer="", code="no_matplotlib", message=message, suggestion=cure))
    if not mistakes:
        mistakes = _refusals(variants)
    if mistakes:
        raise ComparisonInvalid("nothing was run", mistakes)
    return variants


def _refusals(variants: Sequence[Variant]) -> list[FieldError]:
    mistakes: list[FieldError] = []
    with closing(ProcessPlanner()) as planner:
        for variant in variants:
            try:
                planner.plan(variant.spec)
            except PlanRefusedProblem as refused:
                mistakes += [e.model_copy(update={"message": f"{variant.name}: {e.message}"}) for e in refused.errors]
    return mistakes


def _run_all(variants: Sequence[Variant], console: Console) -> list[VariantResult]:
    results: list[VariantResult] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
        for variant in variants:
            task = bar.add_task(variant.name, total=variant.spec.training.steps, text="starting")

            def show(point: Point, task: TaskID = task, steps: int = variant.spec.training.steps) -> None:
                bar.update(task, completed=point.step, text=f"step {point.step}/{steps}  loss {point.loss:.4f}")

            begin = time.monotonic()
            result = run_variant(variant, show)
            results.append(result)
            bar.update(task, text=result.end)
            bar.console.print(f"{variant.name}: {result.end} after {time.monotonic() - begin:.0f} s", markup=False)
            if result.end == "stopped":
                break
    return results


def _write(comparison: Comparison, request: Request, console: Console) -> None:
    request.out.mkdir(parents=True, exist_ok=True)
    written = [request.out / "compare.csv", request.out / "compare.json"]
    write_csv(comparison, written[0])
    written[1].write_text(comparison.model_dump_json(indent=2))
    if request.plot and any(result.points for result in comparison.variants):
        written.append(request.out / "compare.png")
        plot_comparison(comparison, written[-1])
    console.print(render_comparison(comparison))
    console.print("written: " + ", ".join(map(str, written)), markup=False)
