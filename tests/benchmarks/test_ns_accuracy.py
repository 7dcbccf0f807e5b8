"""The accuracy harness: what it computes is right where nothing is rounded, and its stored table chose the default."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import dmuon_runtime as dmuon
from benchmarks import ns_gradients
from benchmarks.ns_accuracy import FORMS, SETS, SPECTRA, Emulated, emulated, make_matrix, run
from dmuon_runtime.newton_schulz import default_restarts

TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "ns_accuracy-cpu.json"


def test_every_form_is_exact_in_float32_and_worse_in_less() -> None:
    """All sets, on a spectrum that decays; without a restart it drifts in any dtype."""
    rows = run(24, 40, ["1/k"])
    assert len(rows) == len(SETS) * len(FORMS) * 5
    errors = {(r["coefficients"], r["spectrum"], r["form"], r["dtype"]): r["error"] for r in rows}
    for (*rest, dtype), error in errors.items():
        if dtype == "float32" and rest[2] in ("direct", "gram [2] (default)", "gram [3]", "gram [2, 4]"):
            assert error < 1e-3 < errors[(*rest, "bfloat16")], rest
        if dtype == "bfloat16 on this CPU" and rest[2] == "direct":
            assert 1e-3 < error < 1.2 * errors[(*rest, "bfloat16")], rest


@pytest.mark.parametrize("measure", ["error", "direction error"])
@pytest.mark.parametrize("dtype", ["float16", "float16, both halves"])
def test_the_default_restart_is_the_best_single_one_of_the_stored_table(dtype: str, measure: str) -> None:
    """Geometric mean over spectra; the default set."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for row in json.loads(TABLE.read_text())["rows"]:
        if row["coefficients"] == "Polar Express" and row["dtype"] == dtype:
            found[row["form"]].append(math.log(row[measure]))
    assert all(len(logs) == len(SPECTRA) for logs in found.values())
    singles = [f"gram [{step}]" for step in (1, 3, 4)] + ["gram [2] (default)"]
    assert min(singles, key=lambda form: sum(found[form])) == "gram [2] (default)"


@pytest.mark.parametrize("spectrum", ["one large", "1/k", "first gradient"])
@pytest.mark.parametrize("mirrors", [True, False])
def test_half_precision_keeps_the_direction_of_the_largest_singular_value(spectrum: str, mirrors: bool) -> None:
    """Whichever half of a product a kernel computes: with the factors of a step on the right it diverged."""
    restarts = default_restarts(5)
    known = make_matrix(spectrum, 192, 256)
    result = emulated(known, dmuon.POLAR_EXPRESS_COEFFICIENTS, restarts, Emulated(torch.float16, mirrors)).double()
    expected = known.exact(dmuon.POLAR_EXPRESS_COEFFICIENTS)
    direction = known.right[:, 0]
    assert (result - expected).norm() / expected.norm() < 0.05
    assert ((result - expected) @ direction).norm() / (expected @ direction).norm() < 0.06


def test_gradients_of_a_model_show_what_the_default_is_for() -> None:
    rows = ns_gradients.run(64, 2, torch.device("cpu"))
    off = {(row["step"], row["form"]): row["direction error"] for row in rows}
    assert len(off) == 2 * len(ns_gradients.FORMS)
    for step in (1, 2):
        assert off[step, "direct"] < off[step, "gram [2, 4]"] < off[step, "gram [2]"] < off[step, "gram [3]"] / 2
