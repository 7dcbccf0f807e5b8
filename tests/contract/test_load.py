"""The spec refuses what it must, all at once, with a pointer, what was found and the cure."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from worker.contract.errors import SpecInvalid
from worker.contract.load import MAX_SPEC_BYTES, load_spec, parse_document, validate_spec
from worker.contract.spec import JobSpec


def minimal() -> dict[str, Any]:
    return {
        "api_version": "v1",
        "name": "tiny",
        "model": {"type": "llama", "config": {"hidden_size": 32}},
        "data": {"sequence_length": 16},
        "training": {"steps": 2, "global_batch": 4},
    }


def errors_of(text: str | bytes) -> dict[str, str]:
    with pytest.raises(SpecInvalid) as caught:
        load_spec(text)
    return {error.pointer: error.code for error in caught.value.errors}


def changed(path: str, value: Any) -> dict[str, Any]:
    document = minimal()
    *parents, leaf = path.split(".")
    place = document
    for part in parents:
        place = place.setdefault(part, {})
    place[leaf] = value
    return document


def test_minimal_spec_has_every_default() -> None:
    spec = validate_spec(minimal())
    assert spec.world_size == 1
    assert spec.routing.defaults.route == "muon"
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("path", "value", "pointer", "code"),
    [
        ("training.stepz", 3, "/training/stepz", "unknown_field"),
        ("optimizer.muon", {"lr": float("nan")}, "/optimizer/muon/lr", "not_finite"),
        ("optimizer", {"kind": "muon", "muon": {"lr": 0.0}}, "/optimizer/muon/lr", "greater_than"),
        ("optimizer", {"kind": "muon", "muon": {"scale": "none"}}, "/optimizer/muon/scale", "unknown_value"),
        ("optimizer", {"kind": "adamw", "muon": {}}, "/optimizer/muon", "unknown_field"),
        ("optimizer", {"kind": "sgd"}, "/optimizer/kind", "unknown_value"),
        ("optimizer", {"kind": None}, "/optimizer/kind", "unknown_value"),
        ("optimizer", "muon", "/optimizer", "model_type"),
        ("optimizer.kind", "muon", "", ""),
        ("optimizer.kind", "adamw", "", ""),
        ("labels", {"kind=muon": 1}, "/labels/kind=muon", "string_type"),
        ("model.config", {"rope": [1.0, float("inf")]}, "/model/config/rope/1", "not_finite"),
        ("routing.defaults", {"route": "moon"}, "/routing/defaults/route", "unknown_value"),
        ("training.global_batch", 5, "", ""),
        ("mesh.shard", 3, "/training/global_batch", "inconsistent"),
        ("training.micro_batch", 3, "/training/micro_batch", "inconsistent"),
        ("training.schedule", {"warmup_steps": 9}, "/training/schedule/warmup_steps", "inconsistent"),
        ("model.path", "/somewhere", "/model", "inconsistent"),
        ("data", {"sequence_length": 8, "files": ["a"], "directory": "b"}, "/data", "inconsistent"),
        ("name", "Not A Name", "/name", "string_pattern_mismatch"),
        ("kernels.coefficients", [[1.0, 2.0]], "/kernels/coefficients/0/2", "missing"),
        ("kernels.coefficients", [[1.0, 2.0, "3"]], "/kernels/coefficients/0/2", "float_type"),
        ("kernels.coefficients", "polar", "/kernels/coefficients", "unknown_value"),
        ("kernels.coefficients", 5, "/kernels/coefficients", "tuple_type"),
        ("kernels", {"algorithm": "direct", "restarts": [2]}, "/kernels/restarts", "inconsistent"),
        ("kernels", {"algorithm": "direct", "restarts": None}, "", ""),
        ("kernels", {"restarts": [2]}, "", ""),
    ],
)
def test_each_mistake_has_its_pointer(path: str, value: Any, pointer: str, code: str) -> None:
    document = changed(path, value)
    if not code:
        validate_spec(document)
        return
    with pytest.raises(SpecInvalid) as caught:
        validate_spec(document)
    found = {error.pointer: error.code for error in caught.value.errors}
    assert found == {pointer: code}


def test_an_unknown_field_is_told_with_those_of_its_optimizer() -> None:
    document = changed("optimizer", {"kind": "muon", "adamw_name_hint": ["x"], "muon": {"momentun": 0.9}})
    with pytest.raises(SpecInvalid) as caught:
        validate_spec(document)
    cures = {error.pointer: error.suggestion for error in caught.value.errors}
    assert cures == {
        "/optimizer/adamw_name_hint": "Did you mean 'adamw_name_hints'?",
        "/optimizer/muon/momentun": "Did you mean 'momentum'?",
    }
    with pytest.raises(SpecInvalid, match=r"found 'muno', expected 'dmuon', 'muon', 'adamw'.*Did you mean 'muon'"):
        validate_spec(changed("optimizer", {"kind": "muno"}))


def test_all_mistakes_at_once_and_a_suggestion() -> None:
    document = changed("trainin", 1)
    del document["training"]
    document["data"]["sequence_length"] = 0
    with pytest.raises(SpecInvalid) as caught:
        validate_spec(document)
    by_pointer = {error.pointer: error for error in caught.value.errors}
    assert set(by_pointer) == {"/trainin", "/training", "/data/sequence_length"}
    assert by_pointer["/trainin"].suggestion == "Did you mean 'training'?"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_json_numbers_that_overflow(number: str) -> None:
    text = json.dumps(changed("training.clip_grad_norm", "@")).replace('"@"', number)
    assert errors_of(text)["/training/clip_grad_norm"] == "not_finite"


@pytest.mark.parametrize("number", ["1e400", ".nan", ".inf", "-1E+999"])
def test_yaml_numbers_that_overflow(number: str) -> None:
    text = f"api_version: v1\nname: t\nmodel: {{type: llama}}\ndata: {{sequence_length: {number}}}\n"
    text += "training: {steps: 1, global_batch: 1}\n"
    assert errors_of(text)["/data/sequence_length"] == "not_finite"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "{",
        "a: b: c",
        b"\xff\xfe",
        "name: x\nname: y",
        '{"name": "x", "name": "y"}',
        "!!python/object:os.x {}",
    ],
)
def test_text_that_is_no_spec(text: str | bytes) -> None:
    assert errors_of(text) == {"": "unreadable"}


def test_too_long() -> None:
    assert errors_of("#" * (MAX_SPEC_BYTES + 1)) == {"": "unreadable"}


def test_yaml_and_json_are_the_same_document() -> None:
    text = "api_version: v1\nname: tiny\nmodel: {type: llama, config: {hidden_size: 32, rms_norm_eps: 1e-5}}\n"
    text += "data: {sequence_length: 16}\ntraining: {steps: 2, global_batch: 4}\n"
    document = parse_document(text)
    assert document["model"]["config"]["rms_norm_eps"] == 1e-5
    assert load_spec(json.dumps(document)) == load_spec(text)


HEAD = "api_version: v1\nname: tiny\ndata: {sequence_length: 16}\ntraining: {steps: 2, global_batch: 4}\n"


def bomb(link: str) -> str:
    """A model configuration that doubles with every line."""
    lines = ["  a0: &a0 {x0: 1, y0: text}"] + [f"  a{n}: &a{n} {link.format(n - 1)}" for n in range(1, 60)]
    return HEAD + "model:\n type: llama\n config:\n" + "\n".join(lines)


@pytest.mark.parametrize("link", ["[*a{0}, *a{0}]", "{{<<: [*a{0}, *a{0}]}}", "{{b: *a{0}, c: *a{0}}}"])
def test_aliases_that_expand_without_bound(link: str) -> None:
    began = time.monotonic()
    assert errors_of(bomb(link)) == {"": "unreadable"}
    assert time.monotonic() - began < 5


def test_a_long_text_that_aliases_repeat() -> None:
    text = HEAD + f"model: {{type: llama, config: {{a: &a {'x' * 500_000}, b: [*a, *a, *a]}}}}"
    assert errors_of(text) == {"": "unreadable"}


@pytest.mark.parametrize("depth", [70, 700, 5000])
def test_too_deep(depth: int) -> None:
    text = json.dumps(changed("model.config", "@")).replace('"@"', '{"a": ' * depth + "1" + "}" * depth)
    assert set(errors_of(text).values()) <= {"too_deep", "unreadable"}


def test_a_document_that_holds_itself() -> None:
    text = HEAD + "model: {type: llama, config: &a {b: *a}}"
    assert set(errors_of(text).values()) == {"too_deep"}


@pytest.mark.parametrize(
    ("path", "value", "pointer"),
    [
        ("labels", {"a": "\ud800"}, "/labels/a"),
        ("labels", {"\ud800": "a"}, "/labels/\\ud800"),
        ("model.config", {"a": ["b", "\udfff"]}, "/model/config/a/1"),
    ],
)
def test_text_that_is_no_unicode(path: str, value: Any, pointer: str) -> None:
    assert errors_of(json.dumps(changed(path, value))) == {pointer: "not_text"}
    with pytest.raises(SpecInvalid):
        load_spec('{"name": "\ud800"}')


def test_values_and_keys_that_json_does_not_know() -> None:
    text = HEAD + "labels: {1: a}\nmodel: {type: llama, config: {a: !!binary aGk=, b: 0x" + "f" * 5000 + "}}"
    assert errors_of(text) == {
        "/labels/1": "string_type",
        "/model/config/a": "not_json",
        "/model/config/b": "too_large",
    }


def test_merge_keys() -> None:
    text = "model: {type: llama, config: {a: &a {p: 1, q: 2}, b: &b {<<: *a, q: 3}, c: {<<: [*b, *a], p: 4}}}\n"
    assert load_spec(HEAD + text).model.config == {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}, "c": {"p": 4, "q": 3}}
    assert errors_of(HEAD + text.replace("q: 3", "q: 3, q: 3")) == {"": "unreadable"}
    assert errors_of(HEAD + text.replace("<<: *a", "<<: 3")) == {"": "unreadable"}


@pytest.mark.parametrize("value", [True, "10", 10.0])
def test_a_whole_number_is_written_as_one(value: Any) -> None:
    with pytest.raises(SpecInvalid) as caught:
        validate_spec(changed("training.steps", value))
    (error,) = caught.value.errors
    assert error.pointer == "/training/steps" and repr(value) in error.message


def test_strict_types_let_through_what_json_means() -> None:
    document = changed("optimizer", {"adamw": {"betas": [0, 0.5]}, "muon": {"lr": 1}})
    document["kernels"] = {"kernel": "auto", "coefficients": [[1, 2, 3.5]]}
    spec = validate_spec(document)
    assert (spec.optimizer.muon.lr, spec.optimizer.adamw.betas, spec.kernels.kernel) == (1.0, (0.0, 0.5), "auto")
    for path, value in (("optimizer", {"muon": {"lr": "1"}}), ("mesh", {"reshard_after_forward": 1})):
        with pytest.raises(SpecInvalid):
            validate_spec(changed(path, value))


def test_nothing_is_called_empty() -> None:
    for text in ("", "  \n", "# a comment"):
        with pytest.raises(SpecInvalid, match="the spec is empty"):
            load_spec(text)
