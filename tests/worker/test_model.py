"""The model is the same on every rank, and a spec that describes none is refused with its pointer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from worker.contract.errors import PlanRefused
from worker.contract.load import validate_spec
from worker.contract.spec import JobSpec
from worker.model import build_model

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def spec(model: dict[str, Any], **sections: dict[str, Any]) -> JobSpec:
    return validate_spec(
        {
            "api_version": "v1",
            "name": "tiny",
            "model": model,
            "data": {"sequence_length": 8},
            "training": {"steps": 1, "global_batch": 2},
            **sections,
        }
    )


def refused(job: JobSpec) -> list[tuple[str, str]]:
    with pytest.raises(PlanRefused) as caught:
        build_model(job, 256, meta=True)
    return [(entry.pointer, entry.code) for entry in caught.value.errors]


def test_weights_depend_on_the_seed_alone() -> None:
    job = spec({"type": "llama", "config": TINY})
    torch.manual_seed(1)
    first = build_model(job, 256).state_dict()
    after = torch.rand(())
    torch.manual_seed(1)
    assert torch.equal(torch.rand(()), after), "the global random state was left alone"
    second = build_model(job, 256).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_model(
        spec({"type": "llama", "config": TINY}, training={"steps": 1, "global_batch": 2, "seed": 1}), 256
    )
    assert not torch.equal(other.state_dict()["lm_head.weight"], first["lm_head.weight"])


def test_meta_has_shapes_only_and_excluded_parameters_are_frozen() -> None:
    model = build_model(spec({"type": "llama", "config": TINY}, routing={"exclude": ["embed"]}), 256, meta=True)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert tuple(model.get_parameter("lm_head.weight").shape) == (256, 16)


def test_what_transformers_would_swallow_is_refused() -> None:
    assert refused(spec({"type": "llama", "config": {**TINY, "hiden_size": 8}})) == [
        ("/model/config/hiden_size", "unknown_field")
    ]
    assert refused(spec({"type": "lama"})) == [("/model/type", "unknown_model_type")]
    assert refused(spec({"type": "llama", "config": {**TINY, "hidden_size": 17}})) == [("/model/config", "bad_config")]
    assert refused(spec({"type": "llama", "config": {**TINY, "hidden_act": "none"}})) == [
        ("/model/config", "bad_config")
    ]
    assert refused(spec({"path": "/nonexistent/model"})) == [("/model/path", "bad_model_path")]


def test_model_and_data_must_fit() -> None:
    config = {**TINY, "vocab_size": 255, "max_position_embeddings": 7}
    assert refused(spec({"type": "llama", "config": config})) == [
        ("/model/config/vocab_size", "vocabulary_too_small"),
        ("/data/sequence_length", "sequence_too_long"),
    ]


def test_weights_from_disk(tmp_path: Path) -> None:
    saved: Any = build_model(spec({"type": "llama", "config": TINY}), 256)
    saved.save_pretrained(tmp_path)
    loaded = build_model(spec({"path": str(tmp_path)}, training={"steps": 1, "global_batch": 2, "seed": 5}), 256)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in saved.state_dict().items())


@pytest.mark.parametrize("path", ["/nope", "a/b/c/d", "/" + "x" * 300])
def test_a_path_that_does_not_exist_is_said_to_be_none(path: str) -> None:
    with pytest.raises(PlanRefused, match=f"/model/path: no such directory: {path}"):
        build_model(spec({"path": path}), 256, meta=True)


def test_excluding_everything_is_refused_in_the_words_of_the_spec() -> None:
    job = spec({"type": "llama", "config": TINY}, routing={"exclude": ["model", "lm_head"]})
    with pytest.raises(PlanRefused) as caught:
        build_model(job, 256, meta=True)
    (entry,) = caught.value.errors
    assert entry.pointer == "/routing/exclude" and "excludes all 12 parameters" in entry.message
    assert "lambda" not in str(entry)
