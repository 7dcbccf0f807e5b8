"""Measured choices: kept, merged, handed on, ignored when foreign, and used."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pwd
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from dmuon_runtime import _choice_store, _ns_measure
from dmuon_runtime._choice_store import ChoiceStore, choice_store, machine_of
from dmuon_runtime._ns_choices import Choices, Form
from dmuon_runtime._ns_groups import Group, Recipe, decide_form, is_open, rounds
from dmuon_runtime._ns_measure import Measuring
from dmuon_runtime.kernels import KERNELS
from dmuon_runtime.kernels._cublas import plain_product
from dmuon_runtime.kernels._settings import cache_directory, keep_compiled_kernels
from dmuon_runtime.kernels._tiles import (
    FLAT,
    LARGE,
    OBLONG,
    PING_PONG,
    SMALL,
    TILES,
    Product,
    candidate_tiles,
    decide_plain_tile,
    decide_tile,
    matrices_that_fill,
)
from dmuon_runtime.kernels.syrk_quack import Quack, product_of
from dmuon_runtime.ledger import NsCount, snapshot
from dmuon_runtime.newton_schulz import NewtonSchulz

CPU = torch.device("cpu")
MACHINE = {"chip": "test", "torch": "0"}
SHAPES = [(2, 160, 256), (160, 160), (8, 16)]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))


def matrices_by(kernel: str, algorithm: str) -> int:
    return snapshot().get((kernel, algorithm), NsCount()).matrices


def test_the_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path
    monkeypatch.delenv("DMUON_CACHE_DIR")
    assert cache_directory() == Path.home() / ".cache" / "dmuon"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    assert cache_directory().name == f"dmuon-{os.getuid()}", "a user without a home"


def test_what_is_added_is_found_by_another_process_of_the_same_machine(tmp_path: Path) -> None:
    ChoiceStore(tmp_path, MACHINE).add({"a": "gram"})
    assert ChoiceStore(tmp_path, MACHINE).load() == {"a": "gram"}
    assert ChoiceStore(tmp_path, {**MACHINE, "torch": "1"}).load() == {}, "another version measures anew"


def test_writers_merge(tmp_path: Path) -> None:
    first, second = (ChoiceStore(tmp_path, MACHINE) for _ in range(2))
    first.add({"a": "gram", "b": "gram"})
    second.add({"b": "direct", "c": "direct"})
    assert first.load() == {"a": "gram", "b": "gram", "c": "direct"}, "what this process measured counts here"
    assert ChoiceStore(tmp_path, MACHINE).load() == {"a": "gram", "b": "direct", "c": "direct"}
    assert not list(tmp_path.glob("*.partial"))


def _add_many(directory: str, name: str) -> None:
    store = ChoiceStore(Path(directory), MACHINE)
    for number in range(20):
        store.add({f"{name}{number}": "gram"})


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_many, args=(str(tmp_path), name)) for name in "xyz"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(ChoiceStore(tmp_path, MACHINE).load()) == 60


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2}', json.dumps({"format": 1, "machine": {"chip": "other"}, "choices": {"a": "b"}}),
     json.dumps({"format": 1, "machine": MACHINE, "choices": {"a": 1}})],
)  # fmt: skip
def test_an_unreadable_or_foreign_file_is_ignored_and_said_once(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ChoiceStore(tmp_path, MACHINE)
    store.path.write_text(text)
    assert store.load() == store.load() == {}
    assert len(caplog.records) == 1 and "are ignored" in caplog.records[0].getMessage()
    store.add({"a": "gram"})
    assert ChoiceStore(tmp_path, MACHINE).load() == {"a": "gram"}, "and replaced"


def test_where_nothing_can_be_written_choices_live_in_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    store = ChoiceStore(blocked, MACHINE)
    store.add({"a": "gram"})
    store.add({"b": "gram"})
    assert store.load() == {"a": "gram", "b": "gram"}
    assert sum("in this process alone" in record.getMessage() for record in caplog.records) == 1


def test_the_machine_names_chip_driver_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert set(machine_of(CPU)) == {"chip", "driver", "torch", "triton", "quack-kernels", "nvidia-cutlass-dsl"}
    assert machine_of(CPU)["torch"] == torch.__version__
    assert choice_store(CPU) is choice_store(CPU)
    facts = tmp_path / "facts"
    facts.write_text("processor\t: 0\nmodel name\t: Some CPU 9\nmodel name\t: Some CPU 9\n")
    monkeypatch.setattr(_choice_store, "CPU_FACTS", facts)
    assert " Some CPU 9 " in machine_of(CPU)["chip"], "two CPUs of one architecture are two machines"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(_choice_store, "DRIVER_MODULE", facts)
    facts.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.12.4  Release Build\n")
    first = machine_of(torch.device("cuda", 0))
    assert first["chip"] == "Some GPU" and first["driver"].startswith("570.12.4, CUDA ")
    facts.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.12.5  Some day\n")
    assert machine_of(torch.device("cuda", 0))["driver"].startswith("570.12.5, ")
    facts.unlink()
    assert machine_of(torch.device("cuda", 0))["driver"].startswith("unknown, ")


def test_compiled_kernels_are_kept_beside_the_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUACK_CACHE_DIR", "")  # so that it is as before afterwards
    keep_compiled_kernels()
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "quack") and (tmp_path / "quack").is_dir()
    monkeypatch.setenv("QUACK_CACHE_DIR", "elsewhere")
    keep_compiled_kernels()
    assert os.environ["QUACK_CACHE_DIR"] == "elsewhere", "the user's word counts"
    monkeypatch.delenv("QUACK_CACHE_DIR")
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path / "file"))
    keep_compiled_kernels()
    assert "QUACK_CACHE_DIR" not in os.environ, "its own default"


def test_choices_travel_as_json() -> None:
    choices = Choices({"form/x": "gram"})
    assert Choices.from_json(json.loads(json.dumps(choices.to_json()))) == choices
    with pytest.raises(ValueError, match="must map class names to winners"):
        Choices.from_json({"a": 1})  # type: ignore[dict-item]


def test_form_is_a_question_only_where_flops_do_not_answer_it() -> None:
    square = Form("cublas", 1, 512, 512, "float32", 5, 1)
    long = Form("cublas", 1, 512, 4096, "float32", 5, 1)
    small = Form("cublas", 1, 64, 64, "float32", 5, 1)
    assert [is_open(form) for form in (square, long, small)] == [True, False, False]
    assert [decide_form(form, {}) for form in (square, long, small)] == ["direct", "gram", "direct"]
    measured = {form.key: "gram" for form in (square, small)} | {long.key: "direct"}
    assert [decide_form(form, measured) for form in (square, long, small)] == ["gram", "gram", "direct"]
    assert decide_form(square, {square.key: "sideways"}) == "direct", "a foreign word is no choice"
    assert square.of(5).key == square.of(8).key != square.of(9).key


def test_small_matrices_in_float16_are_direct_whatever_their_aspect_ratio() -> None:
    """There one direction would come out wrong; docs/adr/0005."""
    forms = [Form("cublas", 1, side, 16 * side, dtype, 5, 1) for dtype in ("float16", "float32") for side in (127, 128)]
    assert [decide_form(form, {form.key: "gram"}) for form in forms] == ["direct", "gram", "gram", "gram"]


def test_tiles_are_taken_from_choices_only_where_they_compile() -> None:
    product = Product(1, 4096, 4096, True, True, "float16")
    assert decide_tile(product, {}) == PING_PONG
    assert set(candidate_tiles(product)) <= {"ping_pong", "small", "flat"}
    few = Product(1, 1024, 1024, True, True, "float16")
    assert decide_tile(few, {}) == FLAT
    assert decide_tile(few, {few.key: "small"}) == SMALL
    long = Product(1, 4096, 14336, True, False, "float16")
    assert decide_tile(long, {}) == PING_PONG
    assert decide_tile(long, {long.key: "large"}) == LARGE
    columns = Product(1, 4096, 14336, False, False, "float16")
    assert decide_tile(columns, {columns.key: "large"}) == PING_PONG, "the compiler would end the process"
    assert decide_tile(columns, {columns.key: "no tile"}) == PING_PONG
    one = Product(1, 2048, 2048, True, True, "float16")
    assert decide_tile(one, {}) == OBLONG, "136 tiles of 128 x 128 take two waves on 132 multiprocessors"
    keys = {few.key, long.key, columns.key, product.key, one.key}
    assert len(keys) == 5


def test_a_plain_product_goes_to_cublas_where_no_tile_is_faster() -> None:
    sizes = ((1, 512), (1, 1024), (1, 2048), (64, 512), (8, 2048), (1, 4096))
    tiles = [decide_plain_tile(number, size, size) for number, size in sizes]
    assert [tile and (tile.tile_m, tile.tile_n) for tile in tiles] == [(64, 64), (64, 128), (128, 128)] + [None] * 3


def _rounds(shapes: list[tuple[int, ...]], device: str = "cuda") -> list[list[int]]:
    short_dim = min(shapes[0][-2:])
    group = Group(torch.device(device), torch.float16, short_dim, 0, "quack", "gram")
    return rounds(group, list(range(len(shapes))), shapes)


def test_a_device_is_filled_by_one_matrix_of_4096_or_some_smaller_ones() -> None:
    assert [matrices_that_fill(n) for n in (4096, 2048, 3072, 8192)] == [1, 12, 3, 1]
    assert matrices_that_fill(64) * 64**3 >= 4096**3


def test_a_large_group_runs_in_rounds() -> None:
    """Each index once; sizes with enough matrices in rounds of their own, as equal as can be; the others together."""
    square, wide, tall = (2048, 2048), (2048, 8192), (8192, 2048)
    found = _rounds([square, wide] * 20 + [square] * 44 + [tall] * 5 + [(2048, 4096)] * 3)
    assert sorted(index for part in found for index in part) == list(range(92))
    assert [len(part) for part in found] == [13, 13, 13, 13, 12, 20, 8]
    assert found[-1] == list(range(84, 92))
    assert _rounds([(4096, 4096), (4096, 14336), (4096, 4096)]) == [[0], [2], [1]]


def test_a_small_group_and_one_on_a_cpu_run_at_once() -> None:
    assert _rounds([(2048, 2048)] * 23) == [list(range(23))]
    assert _rounds([(2048, 2048)] * 99, "cpu") == [list(range(99))]
    assert _rounds([(40, 2048, 2048), (2048, 2048)]) == [[0], [1]], "a tensor is never cut"


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("with_c", [False, True])
@pytest.mark.parametrize("size", [256, 512, 1024, 2048, 4096, 8192])
@pytest.mark.parametrize("number", [1, 3, 64])
def test_the_static_choice_is_always_a_candidate(contiguous: bool, with_c: bool, size: int, number: int) -> None:
    for inner in (size,) if with_c else (size, 4 * size):
        product = Product(number, size, inner, contiguous, with_c, "float16")
        usual = next(name for name in TILES if TILES[name] == decide_tile(product, {}))
        assert usual in candidate_tiles(product)


def test_prepare_measures_once_and_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[str, ...]] = []

    def fake_times(calls: dict[str, object], *_: object, **__: object) -> dict[str, float]:
        timed.append(tuple(calls))
        return {name: {"gram": 1.0}.get(name, 2.0) for name in calls}

    monkeypatch.setattr(_ns_measure, "milliseconds", fake_times)
    said: list[str] = []
    ns = NewtonSchulz()
    before = snapshot()
    choices = ns.prepare(SHAPES, torch.float32, CPU, said.append)
    assert snapshot() == before, "what is measured updates nothing"
    assert set(choices.entries.values()) == {"gram"} and len(choices.entries) == 2, "the 8 x 16 matrix is no question"
    assert timed.count(("gram", "direct")) == 2 and len(said) == 2
    ns(torch.ones(160, 160))
    assert (
        snapshot()["cublas", "gram"].matrices
        == before.get(("cublas", "gram"), type(snapshot()["cublas", "gram"])()).matrices + 1
    )
    again = NewtonSchulz()
    assert again.prepare(SHAPES, torch.float32, CPU, said.append) == choices
    assert len(said) == 2, "known from the file"


def test_a_measured_difference_within_the_noise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"gram": 0.99, "direct": 1.0, "product": 1.0}
    monkeypatch.setattr(_ns_measure, "milliseconds", lambda calls, *_, **__: {name: times[name] for name in calls})
    entries = NewtonSchulz().prepare([(160, 160)], torch.float32, CPU).entries
    assert list(entries.values()) == ["direct"], "the static rule's, though the other was 1 % faster"


def test_adopted_choices_are_used_and_nothing_is_measured() -> None:
    giver, taker = NewtonSchulz(), NewtonSchulz()
    choices = giver.prepare([(160, 160)], torch.float32, CPU)
    (key,) = choices.entries
    for form in ("gram", "direct"):
        taker.adopt(Choices.from_json({key: form}))
        before = snapshot()
        taker(torch.ones(160, 160))
        ran = {
            name
            for name, count in snapshot().items()
            if count.matrices > (before[name].matrices if name in before else 0)
        }
        assert ran == {("cublas", form)}
    assert taker.prepare([(200, 200)], torch.float32, CPU).entries == {key: "direct"}


def test_measuring_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert NewtonSchulz().prepare([(160, 160)], torch.float32, CPU).entries
    assert torch.equal(torch.rand(4), expected), "a start that measures trains as one that does not"


def test_deterministic_measures_nothing() -> None:
    ns = NewtonSchulz(deterministic=True)
    assert ns.prepare([(160, 160)], torch.float32, CPU).entries == {}


def test_measuring_on_a_cpu_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ns_measure, "CPU_BUDGET_S", 1e-9)
    assert NewtonSchulz().prepare([(160, 160)], torch.float32, CPU).entries == {}, "the static rule stays"


def test_real_times_are_taken_and_the_result_stays_the_same() -> None:
    matrix = torch.randn(2, 128, 160, generator=torch.Generator().manual_seed(0))
    ns = NewtonSchulz()
    before, counted = ns(matrix), snapshot()
    ns.prepare([matrix.shape], torch.float32, CPU)
    assert snapshot() == counted, "what is measured updates nothing"
    torch.testing.assert_close(ns(matrix), before, rtol=0, atol=1e-4)
    assert os.listdir(cache_directory())


def test_auto_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmuon_runtime.kernels._registry._said", set())
    with caplog.at_level(logging.INFO, logger="dmuon_runtime"):
        NewtonSchulz()
        NewtonSchulz()
    assert sum("Newton-Schulz: auto is" in record.getMessage() for record in caplog.records) == 1


class FakeQuack(Quack):
    """quack's tiles on a CPU: ``wrong`` computes nonsense."""

    wrong = "small"

    def _launch(self, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
        plain_product(a, b, c, alpha, beta, out)
        if decide_tile(product_of(a, b, c), self._choices) == TILES[self.wrong]:
            out.mul_(2)


def measure_tiles(path: Path) -> dict[str, str]:
    store = ChoiceStore(path, MACHINE)
    measuring = Measuring(CPU, torch.float32, Recipe(*NewtonSchulz().plan(5)), store, None)
    measuring.tiles(Group(CPU, torch.float32, 1024, 0, "quack", "gram"), [(1, 1024, 1024), (1, 2048, 1024)])
    return measuring.found


def test_tiles_are_measured_for_every_product_and_a_wrong_one_never_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(KERNELS, "quack", FakeQuack())
    names: list[tuple[str, ...]] = []

    def times(calls: dict[str, object], *_: object) -> dict[str, float]:
        names.append(tuple(calls))
        return {name: float(place) for place, name in enumerate(calls, 1)}

    monkeypatch.setattr(_ns_measure, "milliseconds", times)
    found = measure_tiles(tmp_path)
    assert names == [("flat", "ping_pong")] * 3, "shared products, then each stack"
    assert found == {
        "tile/2/1024/1024/rows+c/float32": "flat",
        "tile/1/1024/1024/rows/float32": "flat",
        "tile/1/1024/2048/columns/float32": "flat",
    }
    assert any("is wrong on" in record.getMessage() for record in caplog.records)
    assert measure_tiles(tmp_path) == found and len(names) == 3, "known from the file"
