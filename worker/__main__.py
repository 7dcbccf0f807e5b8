"""``python -m worker``: run or plan a spec without a server, or export the model of a checkpoint.

Exit codes: 0 done, 1 failed, 2 the spec or its plan was refused, 130 stopped from the keyboard.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from worker.checkpoints import CheckpointError
from worker.contract.errors import ContractError
from worker.contract.load import load_spec
from worker.contract.messages import Milestone, RankError
from worker.contract.spec import JobSpec
from worker.contract.states import Reason
from worker.local import Body, run_local

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "plan" and options.serve:
        return _serve()
    if options.command == "export":
        return _export(options.checkpoint, options.directory)
    try:
        spec = load_spec(Path(options.spec).read_bytes())
        return _plan(spec, options.chip) if options.command == "plan" else _run(spec, options.save, options.json)
    except ContractError as error:
        for entry in error.errors:
            print(f"{options.spec}: {entry}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot read {options.spec}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted from the keyboard", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker", description="Run or plan a job spec without a server.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train on this machine, one process a worker")
    run.add_argument("spec", help="YAML or JSON file")
    run.add_argument("--save", type=Path, help="file for the final weights, as torch.save of names and full tensors")
    run.add_argument("--json", action="store_true", help="print every message of every worker, one JSON a line")
    export = commands.add_parser("export", help="write the model of a checkpoint for transformers' from_pretrained")
    export.add_argument("checkpoint", type=Path, help="directory of one checkpoint")
    export.add_argument("directory", type=Path, help="directory to make")
    plan = commands.add_parser("plan", help="print the plan as JSON, or why there is none")
    group = plan.add_mutually_exclusive_group(required=True)
    group.add_argument("spec", nargs="?", help="YAML or JSON file")
    group.add_argument("--serve", action="store_true", help="answer one request a line from standard input")
    plan.add_argument("--chip", help="predict the cost of a step on it, such as nvidia-h200")
    return parser


def _plan(spec: JobSpec, chip: str | None) -> int:
    from worker.planner import make_plan

    print(make_plan(spec, chip=chip).model_dump_json(indent=2))
    return 0


def _export(checkpoint: Path, directory: Path) -> int:
    from worker.checkpoints.weights import export_model

    try:
        export_model(checkpoint, directory)
    except (CheckpointError, ContractError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{directory} can be given to from_pretrained")
    return 0


def _serve() -> int:
    """Answer requests until standard input ends; nothing else may write to standard output."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    from worker.planner import answer

    for line in sys.stdin:
        if line.strip():
            print(answer(line), file=answers, flush=True)
    return 0


def _run(spec: JobSpec, save: Path | None, as_json: bool) -> int:
    from worker.planner import make_plan

    plan = make_plan(spec)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    end = run_local(spec, _print_json if as_json else _Progress(spec), save=save, plan_hash=plan.plan_hash)
    print(f"{end.reason}: {end.message}", file=sys.stderr)
    return {Reason.COMPLETED: 0, Reason.CANCELLED: 130}.get(end.reason, 1)


def _print_json(body: Body) -> None:
    print(body.model_dump_json(), flush=True)


class _Progress:
    """Prints milestones, errors, and every so many steps what rank 0 reports."""

    def __init__(self, spec: JobSpec) -> None:
        self._steps = spec.training.steps
        self._every = max(1, spec.training.steps // 50)

    def __call__(self, body: Body) -> None:
        if isinstance(body, Milestone):
            if not body.rank:
                print(f"{body.name}: {body.message}", flush=True)
        elif isinstance(body, RankError):
            print(f"{body.error}\n{body.error.traceback}", file=sys.stderr, flush=True)
        elif body.rank == 0 and (body.step % self._every == 0 or body.step in (1, self._steps)):
            kernel = "" if body.kernel is None else f"  kernel {body.kernel}"
            norm = "" if body.grad_norm is None else f"  norm {body.grad_norm:.3f}"
            print(
                f"step {body.step}/{self._steps}  loss {body.loss:.4f}{norm}  {body.step_seconds:.3f} s"
                f"{kernel}{'  skipped' if body.skipped else ''}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
