"""Policies resolve field by field in order; every mistake is named at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmuon_runtime.errors import PolicyError
from dmuon_runtime.policy import PolicyFields, parse_param_policy, resolve_policy

WEIGHT = nn.Parameter(torch.zeros(2, 2))


def _resolve(name: str, policy: dict[str, object] | None) -> PolicyFields:
    return resolve_policy([name], WEIGHT, parse_param_policy(policy), None)


def test_later_overrides_change_only_what_they_set() -> None:
    policy: dict[str, object] = {
        "defaults": {"param_dtype": "bf16", "route": "matrix"},
        "overrides": [
            {"name": ["norm", "bias"], "set": {"route": "base", "grad_dtype": "torch.float32"}},
            {"contains": "final_norm", "set": {"param_dtype": None}},
            {"set": {"output_dtype": "fp16"}},
        ],
    }
    assert _resolve("final_norm.weight", policy) == PolicyFields(
        route="adamw",
        param_dtype=None,
        grad_dtype=torch.float32,
        output_dtype=torch.float16,
        rule="overrides[0]",
        matched_overrides=(0, 1, 2),
    )
    assert _resolve("up.weight", policy).rule == "defaults"
    assert _resolve("up.weight", policy).param_dtype is torch.bfloat16


def test_without_a_policy_everything_is_muon() -> None:
    assert _resolve("x", None) == PolicyFields()


def test_a_tied_parameter_answers_to_each_of_its_names() -> None:
    policy = parse_param_policy({"overrides": [{"name": "embed", "set": {"route": "sharded"}}]})
    for names in (["lm_head.weight", "embed.weight"], ["embed.weight", "lm_head.weight"]):
        assert resolve_policy(names, WEIGHT, policy, None).route == "sharded_adamw"
    assert resolve_policy(["lm_head.weight"], WEIGHT, policy, None).route == "muon"


def test_route_hint_decides_and_is_recorded() -> None:
    hinted = resolve_policy(["x"], WEIGHT, parse_param_policy(None), lambda name, parameter: "sharded")
    assert (hinted.route, hinted.rule) == ("sharded_adamw", "route_hint_fn")
    silent = resolve_policy(["x"], WEIGHT, parse_param_policy(None), lambda name, parameter: None)
    assert (silent.route, silent.rule) == ("muon", "defaults")
    with pytest.raises(PolicyError, match="sgd"):
        resolve_policy(["x"], WEIGHT, parse_param_policy(None), lambda name, parameter: "sgd")


MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"default": {}}, r"unknown keys \['default'\]"),
    ({"defaults": {"rout": "muon"}}, r"defaults has the unknown field 'rout'"),
    ({"defaults": {"route": "sgd"}}, r"defaults\.route: unknown route 'sgd'"),
    ({"defaults": {"param_dtype": "int8"}}, r"defaults\.param_dtype: unknown dtype 'int8'"),
    ({"defaults": {"param_dtype": torch.int64}}, r"defaults\.param_dtype: dtype torch\.int64"),
    ({"defaults": {"rule": "x"}}, r"unknown field 'rule'"),
    ({"defaults": {"split_rows": [0, 4]}}, r"split_rows must be"),
    ({"defaults": {"split_rows": "44"}}, r"split_rows must be"),
    ({"defaults": {"cast_forward_inputs": 1}}, r"cast_forward_inputs must be"),
    ({"defaults": {"matrix_view": "rows"}}, r"matrix_view must be"),
    ({"overrides": [{"name": "a"}]}, r'overrides\[0\] has no "set"'),
    ({"overrides": [{"name": "a", "contains": "b", "set": {}}]}, r'both "name" and its old alias'),
    ({"overrides": [{"match": "a", "set": {}}]}, r"unknown keys \['match'\]"),
    ({"overrides": [{"name": [3], "set": {}}]}, r"overrides\[0\]\.name"),
    ({"overrides": "a"}, r"overrides must be a list"),
    ({"overrides": [3]}, r"overrides\[0\] must be a mapping"),
]


@pytest.mark.parametrize(("policy", "message"), MISTAKES)
def test_mistakes_are_named(policy: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        parse_param_policy(policy)


def test_all_mistakes_come_at_once() -> None:
    policy: dict[str, object] = {}
    for mistake, _ in MISTAKES[:3]:
        policy.update(mistake)
    policy["overrides"] = [{"name": "a", "set": {"rout": 1, "route": "x"}}]
    with pytest.raises(PolicyError) as found:
        parse_param_policy(policy)
    assert len(found.value.names) == 4
