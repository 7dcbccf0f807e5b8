"""The cost model beside what was measured, and what it says of meshes on which nothing was run.

    python -m benchmarks.cost_model [--plot docs/images/scaling.png]     checks, then the table of docs/scaling.md
    python -m benchmarks.cost_model --fit                                Newton-Schulz figures from the measured cases

Measured are the published rows on 2 H200s in this file and, where they exist, the rows of ``step-*-nvidia-h200.json``
and ``newton_schulz-nvidia-h200.json`` under ``benchmarks/results``. Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dmuon_runtime as dmuon
from benchmarks.common import RESULTS, print_table, write_result
from benchmarks.newton_schulz import gpu_cases
from benchmarks.workloads import WORKLOADS, Workload
from dmuon_runtime.chips import H200, ChipFigures
from dmuon_runtime.cost_model import Axis, Prediction, StepWork, ns_seconds, predict_step, split_ns_seconds
from dmuon_runtime.matrices import MatrixShape
from dmuon_runtime.partition import ns_flops

__all__ = ["fitted", "main", "ns_cases", "plan_of", "predict", "work_of"]

MODELS: Mapping[str, Workload] = {
    "8B": Workload(4096, 14_336, 32, 32, 8, 128_256, 1, 8192),
    "70B": Workload(8192, 28_672, 80, 64, 8, 128_256, 1, 8192),
}
"""Llama-3.1 shapes; one sequence of 8192 tokens a GPU."""
MESHES = ((1, 8), (1, 64), (8, 8), (1, 1024), (128, 8), (16, 64), (2048, 8), (256, 64))
"""Replicate x shard."""
PUBLIC_NS_MS = {(2048, 2048): 0.650, (2048, 8192): 1.055}
"""One call of the public dmuon package's Newton-Schulz, one matrix after the other, in the run of the rows below."""
CASE_KINDS = {"Llama-3-8B, 1 of 8 ranks": "set by it"}
PUBLISHED = {"fsdp2 + adamw": (319.2, 5.1), "public dmuon": (361.5, 54.4)}
"""Step and optimizer ms of the workload ``llama`` on 2 H200s, torch 2.11."""


def plan_of(workload: Workload, mesh: tuple[int, int], *, reshard: bool = True) -> dmuon.RuntimePlan:
    """Return the plan of the contestant ``ours pure``, made on meta tensors."""
    model = workload.build(torch.device("meta"))
    policy = {
        "defaults": {"route": "muon", "param_dtype": torch.bfloat16, "grad_dtype": torch.float32},
        "overrides": [
            {"name": ["norm"], "set": {"route": "adamw"}},
            {"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}},
        ],
    }
    return dmuon.plan_params(
        model, mesh, lambda _, p: p.requires_grad, param_policy=policy, reshard_after_forward=reshard
    )


def work_of(workload: Workload) -> StepWork:
    """Return what one rank computes of ``workload`` in a step."""
    return StepWork(
        tokens=workload.batch * workload.sequence,
        looked_up=frozenset({"model.embed_tokens.weight"}),
        score_flops_per_token=2.0 * workload.layers * workload.hidden * workload.sequence,
    )


def predict(workload: Workload, mesh: tuple[int, int], *, reshard: bool = True, chip: ChipFigures = H200) -> Prediction:
    """Return the prediction for ``ours pure``."""
    return predict_step(plan_of(workload, mesh, reshard=reshard), chip, work_of(workload))


def ns_cases() -> Iterator[tuple[str, list[MatrixShape], float]]:
    """Yield name, matrices and measured seconds of each Newton-Schulz case on an H200."""
    shapes = gpu_cases()
    for row in json.loads((RESULTS / "newton_schulz-nvidia-h200.json").read_text())["rows"]:
        yield row["case"], [MatrixShape(*shape) for shape in shapes[row["case"]]], row["ours"] * 1e-3


def is_fitted(name: str) -> bool:
    """True for the cases that set the figures of a group: shapes alone; those with a model's name are longer work."""
    return name[0].isdigit()


def fitted() -> tuple[float, float, float]:
    """Return seconds a group, FLOP/s and seconds an element that fit the measured cases best, by relative error."""
    rows, ones = [], []
    for shapes, seconds in ((shapes, seconds) for name, shapes, seconds in ns_cases() if is_fitted(name)):
        elements = sum(s.count * s.rows * s.columns for s in shapes)
        rows.append([1 / seconds, sum(map(ns_flops, shapes)) / seconds, elements / seconds])
        ones.append([1.0])
    matrix, target = torch.tensor(rows, dtype=torch.float64), torch.tensor(ones, dtype=torch.float64)
    scale = matrix.amax(0)
    group, flop, element = (torch.linalg.lstsq(matrix / scale, target).solution[:, 0] / scale).tolist()
    return group, 1 / flop, element


def _print_fit() -> None:
    group, rate, element = fitted()
    print(f"ns_group_s={group:.4g}, ns_flops_per_s={rate:.4g}, ns_element_s={element:.4g}")
    rows = [
        (name, seconds * 1e3, ns_seconds(H200, shapes) * 1e3, ns_seconds(H200, shapes) / seconds - 1, is_fitted(name))
        for name, shapes, seconds in ns_cases()
    ]
    print_table(("case", "measured ms", "model ms", "error", "sets the model"), rows)


def _check(what: str, predicted: float, measured: float, kind: str) -> dict[str, Any]:
    error = predicted / measured - 1
    return {"what": what, "predicted": predicted, "measured": measured, "error": error, "kind": kind}


def checks() -> list[dict[str, Any]]:
    """Return predictions beside measurements; ``kind`` says whether the figure was used to set the model."""
    found = predict(WORKLOADS["llama"], (1, 2))
    adamw_ms, adamw_update_ms = PUBLISHED["fsdp2 + adamw"]
    step_ms, update_ms = PUBLISHED["public dmuon"]
    layers = WORKLOADS["llama"].layers // 2  # of one owner
    public_ns = layers * (4 * PUBLIC_NS_MS[2048, 2048] + 3 * PUBLIC_NS_MS[2048, 8192])
    public_update = public_ns + (found.update_s - found.ns_s) * 1e3
    rest = (found.step_s - found.update_s) * 1e3
    rows = [
        _check("fsdp2 + adamw, step ms", found.adamw_step_s * 1e3, adamw_ms, "set by it"),
        _check("fsdp2 + adamw, optimizer ms", found.adamw_update_s * 1e3, adamw_update_ms, "set by it"),
        _check("public dmuon, optimizer ms", public_update, update_ms, "check"),
        _check("public dmuon, step ms", rest + public_update, step_ms, "check"),
    ]
    for name, shapes, seconds in ns_cases():
        if not is_fitted(name):
            kind = CASE_KINDS.get(name, "check")
            rows.append(_check(f"Newton-Schulz, {name}, ms", ns_seconds(H200, shapes) * 1e3, seconds * 1e3, kind))
    return [*rows, *_step_checks()]


def _step_checks() -> Iterator[dict[str, Any]]:
    """Yield checks against the measured steps of this repository, if there are some."""
    for path in sorted(RESULTS.glob("step-*-nvidia-h200.json")):
        document = json.loads(path.read_text())
        replicas, shards = document["mesh"]
        name = document["benchmark"].removeprefix("step-").rpartition("-")[0]
        for row in document["rows"]:
            workload = WORKLOADS[name].with_batch(document.get("batch"))
            yield from _row_checks(name, workload, (replicas, shards), row)


def _row_checks(
    name: str, workload: Workload, mesh: tuple[int, int], row: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    contestant, mode = row["contestant"][:-3], row["contestant"][-2:]
    if contestant not in ("fsdp2 + adamw", "ours pure"):
        return
    found = predict(workload, mesh, reshard=mode == "Z3")
    ours = contestant == "ours pure"
    what = f"{name} {mesh[0]}x{mesh[1]} {contestant} {mode}"
    yield _check(f"{what}, step ms", (found.step_s if ours else found.adamw_step_s) * 1e3, row["step ms"], "check")
    update = found.update_s if ours else found.adamw_update_s
    yield _check(f"{what}, update ms", update * 1e3, row["update ms"], "check")
    resident = found.resident_bytes if ours else found.adamw_resident_bytes
    yield _check(f"{what}, resident GiB", resident / 2**30, row["resident GiB"], "check")
    counted = row.get("counted", {})
    if ours and counted.get("newton-schulz ms"):
        yield _check(f"{what}, Newton-Schulz ms", found.ns_s * 1e3, counted["newton-schulz ms"], "check")
    exposed = sum(entry["exposed ms"] for entry in counted.get("communication", {}).values())
    if ours and exposed > 0:
        yield _check(f"{what}, exposed communication ms", found.exposed_s * 1e3, exposed, "check")


def extrapolation() -> list[dict[str, Any]]:
    """Return the table of docs/scaling.md."""
    rows = []
    for name, workload in MODELS.items():
        for mesh in MESHES:
            found = predict(workload, mesh)
            rows.append(
                {
                    "model": name, "gpus": mesh[0] * mesh[1], "mesh": f"{mesh[0]}x{mesh[1]}",
                    "adamw step ms": found.adamw_step_s * 1e3, "overhead %": found.overhead_ratio * 100,
                    "ns ms": found.ns_s * 1e3, "ns mean ms": found.ns_mean_s * 1e3,
                    "largest ms": found.largest_matrix_s * 1e3, "exposed ms": found.exposed_s * 1e3,
                    "adamw exposed ms": found.adamw_exposed_s * 1e3,
                    "publish exposed ms": found.publish_exposed_s * 1e3,
                    "resident GiB": found.resident_bytes / 2**30, "peak GiB": found.peak_bytes / 2**30,
                    "adamw resident GiB": found.adamw_resident_bytes / 2**30,
                }
            )  # fmt: skip
    return rows


ASKED = (
    ("llama", 8, (1, 2), 6.0), ("small-matrices", 16, (1, 2), 5.0), ("llama-3.2-3b", 2, (1, 8), 4.0),
    ("llama-3.2-3b", 8, (1, 8), 4.0), ("llama-3.1-8b", 1, (1, 8), 3.0), ("llama-3.1-8b", 8, (1, 8), 3.0),
)  # fmt: skip
"""Workload, sequences a GPU, mesh, and the overhead in per cent that a run is asked not to exceed."""


def ahead() -> list[dict[str, Any]]:
    """Return what to expect of the runs that targets are for."""
    rows = []
    for name, batch, mesh, limit in ASKED:
        workload = WORKLOADS[name].with_batch(batch)
        found = predict(workload, mesh)
        rows.append(
            {
                "workload": name, "tokens a GPU": batch * workload.sequence, "gpus": mesh[0] * mesh[1],
                "adamw step ms": found.adamw_step_s * 1e3, "overhead %": found.overhead_ratio * 100, "asked %": limit,
                "update ms": found.update_s * 1e3,
                "exposed, % of the step": (found.forward_exposed_s + found.backward_exposed_s) / found.step_s * 100,
            }
        )  # fmt: skip
    return rows


def splitting(chip: ChipFigures = H200) -> list[dict[str, Any]]:
    """Return what cutting the largest matrix of each model over GPUs of one node would take."""
    rows = []
    for name, workload in MODELS.items():
        shape = MatrixShape(1, workload.mlp, workload.hidden)
        row: dict[str, Any] = {"model": name, "matrix": f"{workload.mlp}x{workload.hidden}"}
        for ways in (1, 2, 4, 8):
            row[f"{ways} ways ms"] = split_ns_seconds(chip, shape, Axis(ways, ways)) * 1e3
        rows.append(row)
    return rows


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw overhead and Newton-Schulz against GPUs, the better mesh of each number."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, name in enumerate(MODELS):
        best: dict[int, Mapping[str, Any]] = {}
        for row in (row for row in rows if row["model"] == name):
            if row["gpus"] not in best or row["overhead %"] < best[row["gpus"]]["overhead %"]:
                best[row["gpus"]] = row
        gpus, color = sorted(best), f"C{number}"
        left.plot(gpus, [best[n]["overhead %"] for n in gpus], "o-", color=color, label=name)
        for n in gpus:
            left.annotate(best[n]["mesh"], (n, best[n]["overhead %"]), (4, 5), textcoords="offset points", fontsize=8)
        right.plot(gpus, [best[n]["ns ms"] for n in gpus], "o-", color=color, label=f"{name}, busiest rank")
        right.plot(gpus, [best[n]["ns mean ms"] for n in gpus], "--", color=color, label=f"{name}, mean over ranks")
    left.set(xscale="log", xlabel="GPUs", ylabel="% of the AdamW step", title="Predicted step overhead over AdamW")
    right.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms", title="Newton-Schulz: one owner a matrix")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_xticks([8, 64, 1024, 16_384], ["8", "64", "1 024", "16 384"])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


def _table(rows: Sequence[Mapping[str, Any]], show: Callable[[Any], Any] = lambda v: v) -> None:
    print_table(tuple(rows[0]), [tuple(show(value) for value in row.values()) for row in rows])
    print()


def main(arguments: Sequence[str]) -> int:
    """Print and write what the model says."""
    parser = argparse.ArgumentParser(prog="benchmarks.cost_model")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    if options.fit:
        _print_fit()
        return 0
    checked, rows, split, asked = checks(), extrapolation(), splitting(), ahead()
    for table in (checked, rows, split, asked):
        _table(table)
    if options.plot is not None:
        plot(rows, options.plot)
    write_result("cost_model", rows, chip=H200.name, assumed=H200.assumed, checks=checked, splitting=split, ahead=asked)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
