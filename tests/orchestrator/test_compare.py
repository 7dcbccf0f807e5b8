"""``dmuonctl compare``: what is compared, what is refused, and the table, the files and the picture."""

from __future__ import annotations

import csv
import io
import json
import math
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.compare import run as running
from orchestrator.compare.plot import plot_comparison
from orchestrator.compare.results import Comparison, render_comparison, smoothed
from orchestrator.compare.run import Point, VariantResult
from orchestrator.compare.variants import Variant, different_data, merge_patch, read_variants
from orchestrator.errors import ComparisonInvalid
from tests.orchestrator.fakes import make_baseline_report, make_report, make_spec
from tests.worker.specs import tiny_document
from worker.contract.messages import RankReport

EXAMPLE = Path(__file__).parents[2] / "examples" / "compare-optimizers.yaml"


def written(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


@pytest.mark.parametrize(
    ("document", "patch", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({"a": {"b": 1}}, {"a": [1]}, {"a": [1]}),
        ({"a": [1, 2]}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}),
        ({"a": 1}, {}, {"a": 1}),
    ],
)
def test_a_variant_changes_its_base_as_a_merge_patch(document: Any, patch: Any, expected: Any) -> None:
    before = json.dumps(document)
    assert merge_patch(document, patch) == expected and json.dumps(document) == before


def test_the_example_is_three_optimizers_on_the_same_data() -> None:
    variants = read_variants([EXAMPLE])
    assert [(v.name, v.spec.optimizer.kind, v.spec.name) for v in variants] == [
        ("dmuon", "dmuon", "compare-dmuon"), ("torch-muon", "muon", "compare-torch-muon"),
        ("adamw", "adamw", "compare-adamw"),
    ]  # fmt: skip
    assert different_data(variants) == []


def test_specs_and_variants_of_a_path_come_together(tmp_path: Path) -> None:
    spec = written(tmp_path / "one.yaml", tiny_document())
    kernels = {"base": "one.yaml", "variants": {"blocked": {"kernels": {"kernel": "blocked"}}, "own": {"name": "mine"}}}
    variants = read_variants([spec, written(tmp_path / "two.yaml", kernels)])
    assert [(v.name, v.spec.name) for v in variants] == [("tiny", "tiny"), ("blocked", "tiny-blocked"), ("own", "mine")]


def test_all_mistakes_of_all_files_at_once(tmp_path: Path) -> None:
    base = tiny_document()
    bad = {"base": base, "extra": 1, "variants": {"x": {"optimizer": {"kind": "sgd"}}, "y": {"trainin": 1}}}
    files = [
        written(tmp_path / "a.yaml", base), written(tmp_path / "b.yaml", base), written(tmp_path / "c.yaml", bad),
        written(tmp_path / "d.yaml", {"base": [], "variants": {}}), written(tmp_path / "e.yaml", {"api_version": "v2"}),
    ]  # fmt: skip
    with pytest.raises(ComparisonInvalid) as caught:
        read_variants(files)
    told = [str(error) for error in caught.value.errors]
    for text in (
        "two runs are called 'tiny'", "/extra: ", "c.yaml, variant 'x': found 'sgd'", "variant 'y': there is no field",
        "d.yaml: base must be", "e.yaml: ",
    ):  # fmt: skip
        assert any(text in line for line in told), (text, told)
    with pytest.raises(ComparisonInvalid, match="found 1 run"):
        read_variants(files[:1])


def invoke(*words: object, code: int) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, words)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_other_data_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "same": {},
        "seed": {"training": {"seed": 3}, "data": {"seed": 2}},
        "batch": {"training": {"global_batch": 6}},
    }
    file = written(tmp_path / "c.yaml", {"base": tiny_document(), "variants": changes})
    output = " ".join(invoke(file, code=2).split())
    assert "/data/seed: found 0 in same, 2 in seed, 0 in batch" in output and "--allow-different-data" in output
    assert "/training/seed: found" in output and "/training/global_batch: found 12 in same" in output
    monkeypatch.setattr("orchestrator.compare.plot.importlib.util.find_spec", lambda name: None)
    assert "dmuon-service[plot]" in invoke(EXAMPLE, code=2)
    invoke(tmp_path / "absent.yaml", code=2)


def result(name: str, losses: list[float], *, tokens: int = 100, end: Any = "completed") -> VariantResult:
    points = tuple(
        Point(step=i, tokens=i * tokens, seconds=i * 0.5, loss=loss, grad_norm=None, skipped=False)
        for i, loss in enumerate(losses, 1)
    )
    return VariantResult(name=name, spec=make_spec(), end=end, message="", kernels=("cublas",), points=points)


def test_points_are_complete_and_losses_are_means() -> None:
    gathered = running._Gatherer(2)
    assert gathered.take(make_report(0, 1)) is None and gathered.take(make_report(0, 2)) is None
    point = gathered.take(make_report(1, 1))
    assert point is not None and (point.step, point.tokens, point.seconds) == (1, 32, 0.04)
    assert gathered.kernels == {"cublas"} and gathered.points == [point]
    alone = running._Gatherer(1)
    alone.take(make_baseline_report(0, 1))
    assert alone.kernels == set()
    assert smoothed(result("x", [float(i) for i in range(40)]).points)[-1] == 38.5
    assert smoothed(result("x", [3.0, 1.0]).points) == [3.0, 1.0]


def test_the_tables() -> None:
    comparison = Comparison(
        variants=(result("long", [4.0 - i / 50 for i in range(100)]), result("none", [], end="failed")),
        differences=("/data/seed: found 1 in long, 2 in none",),
    )
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render_comparison(comparison))
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()]
    rows = {line[0]: line for line in lines}
    assert rows["long"] == ["long", "dmuon", "2", "cublas", "100", "10000", "50.0", "200", "2.0600", "completed"]
    assert rows["none"][-1] == "failed" and "not" in rows
    assert rows["100"] == ["100", "10000", "2.0600", "50.0"] and rows["1"] == ["1", "100", "4.0000", "0.5"]
    assert len([line for line in lines if line[0].isdecimal()]) == 12


@pytest.mark.parametrize("tokens", [100, 200])
def test_the_picture(tmp_path: Path, tokens: int) -> None:
    """A panel of its own for tokens where steps differ in them; NaN, one point and equal ends are drawn as well."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "x.png"
    runs = (result("a", [3.0, 2.0]), result("b", [2.0], tokens=tokens), result("c", [math.nan, 2.0]), result("d", []))
    plot_comparison(Comparison(variants=runs), path)
    height, width, _ = imread(path).shape
    assert (height, width) == (720, 960 * (2 if tokens == 100 else 3))


def test_the_first_interrupt_is_handed_on_and_the_second_ends() -> None:
    class Pipe:
        def __init__(self, *answers: Any) -> None:
            self.answers, self.signals = list(answers), cast("list[int]", [])
            self.stdout = self

        def readline(self) -> str:
            answer = self.answers.pop(0)
            if isinstance(answer, type):
                raise answer
            return str(answer)

        def send_signal(self, number: int) -> None:
            self.signals.append(number)

    pipe = Pipe("a\n", KeyboardInterrupt, "b\n", "")
    assert list(running._lines(cast(Any, pipe))) == ["a\n", "b\n"] and pipe.signals == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        list(running._lines(cast(Any, Pipe(KeyboardInterrupt, KeyboardInterrupt))))


def test_a_run_that_fails_is_kept_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(running.sys, "executable", str(broken))
    found = running.run_variant(Variant("x", make_spec()), lambda point: None)
    assert (found.end, found.message, found.points) == ("failed", "out of luck", ())


@pytest.mark.multiproc
def test_two_optimizers_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process each; the same first loss, since weights and data are the same."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    training = {"steps": 3, "global_batch": 4}
    variants = {"ours": {}, "adam": {"optimizer": {"kind": "adamw"}, "routing": None}}
    file = written(tmp_path / "c.yaml", {"base": tiny_document(training=training), "variants": variants})
    output = invoke(file, "--out", tmp_path / "out", code=0)
    assert "Runs" in output and "adam: completed" in output
    found = Comparison.model_validate_json((tmp_path / "out" / "compare.json").read_text())
    ours, adam = found.variants
    assert [point.step for point in ours.points] == [1, 2, 3] == [point.step for point in adam.points]
    assert (
        ours.points[0].loss == pytest.approx(adam.points[0].loss, rel=1e-6)
        and ours.points[2].loss != adam.points[2].loss
    )
    assert ours.points[-1].tokens == 3 * 4 * 32 and (ours.kernels, adam.kernels) == (("cublas",), ())
    with (tmp_path / "out" / "compare.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["variant"], row["step"]) for row in rows] == [(name, str(i)) for name in variants for i in (1, 2, 3)]
    assert (tmp_path / "out" / "compare.png").stat().st_size > 10_000


def test_reports_of_a_run_are_understood() -> None:
    body = running._BODY.validate_json(make_baseline_report(0, 1).model_dump_json())
    assert isinstance(body, RankReport) and body.kernel is None
