"""The cost model: laws that hold for any chip, and what was measured on H200s."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dmuon_runtime as dmuon
from benchmarks import cost_model as script
from dmuon_runtime._ns_groups import kept_bytes
from dmuon_runtime.chips import H200, find_chip
from dmuon_runtime.cost_model import (
    Axis,
    Prediction,
    StepWork,
    collective_seconds,
    mesh_axes,
    ns_seconds,
    predict_step,
    split_ns_seconds,
)
from dmuon_runtime.matrices import MatrixShape
from dmuon_runtime.partition import NsWork

WORK = StepWork(tokens=4096)


class Stack(nn.Module):
    """Eight layers of one wide and one square matrix, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024, bias=False), nn.Linear(256, 256, bias=False)) for _ in range(8)
        )


def planned(mesh: tuple[int, int], **options: Any) -> dmuon.RuntimePlan:
    with torch.device("meta"):
        model = Stack()
    policy = {
        "defaults": {"route": "muon", "param_dtype": torch.bfloat16},
        "overrides": [{"name": ["embed"], "set": {"route": "sharded_adamw"}}],
    }
    return dmuon.plan_params(model, mesh, lambda *_: True, param_policy=policy, **options)


def predicted(mesh: tuple[int, int], work: StepWork = WORK, **options: Any) -> Prediction:
    return predict_step(planned(mesh, **options), H200, work)


def test_more_steps_take_longer_and_nothing_else() -> None:
    usual, more = predicted((1, 2)), predicted((1, 2), replace(WORK, newton_schulz=NsWork(10, 1)))
    assert more.largest_matrix_s > usual.largest_matrix_s and more.ns_s > usual.ns_s
    assert more.update_s - usual.update_s == pytest.approx(more.ns_s - usual.ns_s)
    assert (more.compute_s, more.exposed_s, more.adamw_step_s) == (usual.compute_s, usual.exposed_s, usual.adamw_step_s)


def test_matrices_of_one_short_side_share_a_group() -> None:
    wide, square, other = MatrixShape(2, 256, 1024), MatrixShape(1, 256, 256), MatrixShape(1, 128, 1024)
    together = ns_seconds(H200, [wide, square])
    apart = ns_seconds(H200, [wide]) + ns_seconds(H200, [square])
    assert apart - together == pytest.approx(H200.ns_group_s)
    assert ns_seconds(H200, [wide, other]) == pytest.approx(ns_seconds(H200, [wide]) + ns_seconds(H200, [other]))
    assert ns_seconds(H200, [MatrixShape(1, 1024, 256)] * 2) == pytest.approx(ns_seconds(H200, [wide]))


def test_long_work_is_slowed_by_the_chips_power_limit() -> None:
    matrix = MatrixShape(1, 4096, 4096)
    slow, steady = replace(H200, ns_sustained_ratio=2.0), replace(H200, ns_sustained_ratio=1.0)
    assert ns_seconds(slow, [matrix]) == ns_seconds(steady, [matrix]) < H200.ns_burst_s
    long = ns_seconds(steady, [matrix] * 100)
    assert long > H200.ns_burst_s
    assert ns_seconds(slow, [matrix] * 100) == pytest.approx(long + (long - H200.ns_burst_s))


def test_graphs_keep_a_round_and_not_all_matrices() -> None:
    one = kept_bytes(((1, 4096, 4096),))
    assert one == 2 * 3 * 4096**2, "X before and after, and Q, in 16 bits"
    assert kept_bytes(((1, 4096, 4096),) * 8) == one, "one at a time fills the device, by one graph"
    assert kept_bytes(((1, 64, 128),) * 3) == 3 * 2 * (2 * 64 * 128 + 64**2), "small ones go together"
    sizes = ((1, 4096, 4096), (1, 14336, 4096))
    assert kept_bytes(sizes) == 2 * (14336 * 4096 + sum(math.prod(size) for size in sizes) + 2 * 4096**2)
    assert kept_bytes(()) == 0


def test_a_collective_takes_its_bytes_over_the_narrowest_wire() -> None:
    free = replace(H200, collective_s=0.0, node_hop_s=0.0, network_hop_s=0.0)
    node, rate = Axis(8, 8), 1e9 / H200.node_bytes_per_s
    assert collective_seconds(free, "broadcast", 1e9, node) == pytest.approx(rate)
    assert collective_seconds(free, "all_gather", 1e9, node) == pytest.approx(7 / 8 * rate)
    assert collective_seconds(free, "all_reduce", 1e9, node) == pytest.approx(14 / 8 * rate)
    across = collective_seconds(free, "broadcast", 1e9, Axis(4, 1))
    assert across == pytest.approx(1e9 / H200.network_bytes_per_s), "one card between nodes"
    assert collective_seconds(free, "broadcast", 1e9, Axis(16, 8)) == pytest.approx(rate), "eight cards outdo the node"
    assert collective_seconds(H200, "broadcast", 1e9, Axis(1, 1)) == 0.0
    four, three = (collective_seconds(H200, "broadcast", 1.0, Axis(n, 1)) for n in (4, 3))
    assert four - three == pytest.approx(H200.network_hop_s)


def test_axes_lie_in_nodes_as_ranks_are_numbered() -> None:
    assert mesh_axes(H200, (4, 8)) == (Axis(4, 1), Axis(8, 8))
    assert mesh_axes(H200, (2, 4)) == (Axis(2, 2), Axis(4, 4))
    assert mesh_axes(H200, (2, 64)) == (Axis(2, 1), Axis(64, 8))


def test_alone_only_the_update_costs_more() -> None:
    found = predicted((1, 1))
    assert found.exposed_s == found.adamw_exposed_s == 0.0
    assert found.step_s - found.adamw_step_s == pytest.approx(found.update_s - found.adamw_update_s)
    assert found.compute_s == pytest.approx(6 * 4096 * (1000 * 256 + 8 * 5 * 256 * 256) / H200.train_flops_per_s)
    looked_up = predicted((1, 1), replace(WORK, looked_up=frozenset({"embed.weight"})))
    assert found.compute_s - looked_up.compute_s == pytest.approx(6 * 4096 * 256_000 / H200.train_flops_per_s)


def test_owners_share_newton_schulz_down_to_the_largest_matrix() -> None:
    slow = [predicted((1, shards)) for shards in (1, 2, 4, 16, 32)]
    assert slow[0].ns_s > slow[1].ns_s > slow[2].ns_s > slow[3].ns_s
    assert slow[-1].ns_s == slow[-2].ns_s == slow[-1].largest_matrix_s, "one owner a matrix"
    assert slow[-1].ns_mean_s < slow[-1].largest_matrix_s
    replicas = predicted((4, 4))
    assert replicas.ns_s == pytest.approx(predicted((1, 16)).ns_s), "owners are spread over replicas too"
    assert replicas.publish_exposed_s > 0.0 == predicted((1, 16)).publish_exposed_s


def test_what_is_kept_is_not_gathered_again() -> None:
    freed, kept = predicted((1, 4)), predicted((1, 4), reshard_after_forward=False)
    assert kept.backward_exposed_s < freed.backward_exposed_s and kept.forward_exposed_s == freed.forward_exposed_s
    replicated = predicted((1, 4), storage="replicated")
    assert replicated.forward_exposed_s == 0.0 < replicated.publish_exposed_s
    assert replicated.adamw_update_s == pytest.approx(4 * freed.adamw_update_s)


def test_compute_hides_what_runs_beside_it_and_nothing_else() -> None:
    plan, axis = planned((1, 4)), Axis(4, 4)
    gathers, reduces = [], []
    for unit in plan.units:
        kinds = [
            ("broadcast", "reduce") if b.owner is not None else ("all_gather", "reduce_scatter") for b in unit.buckets
        ]
        both = list(zip(unit.buckets, kinds, strict=True))
        gathers.append(sum(collective_seconds(H200, kind, b.gather_bytes, axis) for b, (kind, _) in both))  # type: ignore[arg-type]
        reduces.append(sum(collective_seconds(H200, kind, b.reduce_bytes, axis) for b, (_, kind) in both))  # type: ignore[arg-type]
    no_compute = predict_step(plan, replace(H200, train_flops_per_s=1e30), WORK)
    assert no_compute.forward_exposed_s == pytest.approx(sum(gathers))
    assert no_compute.backward_exposed_s == pytest.approx(sum(gathers) + sum(reduces)), "gathered again, and reduced"
    endless = predict_step(plan, replace(H200, train_flops_per_s=1e3), WORK)
    last = plan.backward_order[-1]
    assert endless.forward_exposed_s == pytest.approx(gathers[0])
    assert endless.backward_exposed_s == pytest.approx(gathers[plan.backward_order[0]] + reduces[last])


def test_micro_batches_gather_each_and_reduce_once() -> None:
    once, twice = predicted((1, 4)), predicted((1, 4), replace(WORK, tokens=8192, micro_batches=2))
    assert twice.compute_s == pytest.approx(2 * once.compute_s)
    assert twice.forward_exposed_s == pytest.approx(2 * once.forward_exposed_s)
    assert once.backward_exposed_s < twice.backward_exposed_s < 2 * once.backward_exposed_s


def test_a_split_matrix_keeps_the_products_of_its_short_side() -> None:
    free = replace(H200, collective_s=0.0, node_hop_s=0.0, node_bytes_per_s=1e30, ns_group_s=0.0, ns_element_s=0.0)
    matrix = MatrixShape(1, 4096, 14336)
    whole = ns_seconds(free, [matrix])
    assert split_ns_seconds(free, matrix, Axis(1, 1)) == pytest.approx(whole)
    alone = 14 * 4096**3 / free.ns_flops_per_s
    assert split_ns_seconds(free, matrix, Axis(8, 8)) == pytest.approx(alone + (whole - alone) / 8)
    assert split_ns_seconds(H200, matrix, Axis(8, 8)) > split_ns_seconds(free, matrix, Axis(8, 8))


def test_an_unknown_chip_is_refused_with_those_that_are_known() -> None:
    assert find_chip("NVIDIA H200") is H200
    with pytest.raises(ValueError, match=r"'abacus'; there are of nvidia-h200"):
        find_chip("abacus")


def written(first_cells: tuple[object, ...], text: str) -> list[tuple[float, float]]:
    """Return the numbers of the row of a document that begins with these cells, with half a unit of the last digit."""
    begin = "| " + " | ".join(f"{c:,}".replace(",", " ") if isinstance(c, int) else str(c) for c in first_cells) + " |"
    (row,) = (line for line in text.splitlines() if line.startswith(begin))
    found = re.findall(r"−?[\d.]+", row.removeprefix(begin))
    return [(float(n.replace("−", "-")), 0.5 * 10.0 ** -len(n.partition(".")[2])) for n in found]


def test_the_document_says_what_the_model_says() -> None:
    text = (Path(script.__file__).parents[1] / "docs" / "scaling.md").read_text()
    expected: dict[tuple[object, ...], list[float]] = {}
    for row in script.extrapolation():
        names = (
            "adamw step ms", "overhead %", "ns ms", "ns mean ms", "exposed ms", "adamw exposed ms", "resident GiB",
            "adamw resident GiB",
        )  # fmt: skip
        expected[row["model"], row["gpus"], row["mesh"]] = [row[name] for name in names]
    for row in script.splitting():
        expected[(row["matrix"].replace("x", " × "),)] = [row[f"{ways} ways ms"] for ways in (1, 2, 4, 8)]
    for row in script.ahead():
        names = ("adamw step ms", "overhead %", "asked %", "update ms", "exposed, % of the step")
        expected[row["workload"], str(row["tokens a GPU"]), row["gpus"]] = [row[name] for name in names]
    for cells, values in expected.items():
        found = written(cells, text)
        assert len(found) == len(values), cells
        assert all(abs(n - value) <= half * 1.001 for (n, half), value in zip(found, values, strict=True)), (
            f"docs/scaling.md: {cells}: {found}, the model says {values}; python -m benchmarks.cost_model prints them"
        )


def test_the_document_shows_every_check_and_which_of_them_fail() -> None:
    """A measured step that is kept and not in the table would leave its claim of 15 % unchecked."""
    text = (Path(script.__file__).parents[1] / "docs" / "scaling.md").read_text()
    rows = script.checks()
    for row in rows:
        unit = "GiB" if row["what"].endswith("GiB") else "ms"
        error = f"{row['error'] * 100:+.1f} %".replace("-", "−")
        figures = f"| {row['predicted']:.1f} {unit} | {row['measured']:.1f} {unit} | {error} |"
        assert figures in text, f"docs/scaling.md lacks {row['what']}: {figures}"
    beyond = {row["what"] for row in rows if abs(row["error"]) > 0.15}
    assert all(what.startswith("small-matrices ") for what in beyond), f"the document says that these hold: {beyond}"


def test_the_figures_of_the_h200_are_those_that_were_measured() -> None:
    """Steps are left out: they are measured anew as the runtime changes, and the script lists them."""
    errors = [ns_seconds(H200, shapes) / seconds - 1 for _, shapes, seconds in script.ns_cases()]
    assert max(map(abs, errors)) < 0.25, "fit again: python -m benchmarks.cost_model --fit"
    assert sum(error**2 for error in errors) / len(errors) < 0.1**2
    rows = [row for row in script.checks() if row["what"].startswith(("fsdp2", "public", "Newton-Schulz"))]
    assert {row["kind"] for row in rows} == {"check", "set by it"} and len(rows) >= 7
    assert all(abs(row["error"]) < 0.15 for row in rows), rows
