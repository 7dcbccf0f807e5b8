"""Examples for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["SPEC_BODY", "SPEC_EXAMPLE"]

SPEC_EXAMPLE: Final[dict[str, Any]] = {
    "api_version": "v1",
    "name": "tiny-llama",
    "project": "examples",
    "model": {
        "type": "llama",
        "config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    },
    "data": {"sequence_length": 64},
    "mesh": {"shard": 2},
    "training": {"steps": 20, "global_batch": 8},
    "routing": {
        "defaults": {"route": "muon"},
        "overrides": [{"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}}],
    },
}

_CONTENT = {"schema": {"type": "object", "title": "JobSpec"}, "examples": {"tiny": {"value": SPEC_EXAMPLE}}}
SPEC_BODY: Final[dict[str, Any]] = {
    "requestBody": {"required": True, "content": {"application/json": _CONTENT, "application/yaml": _CONTENT}}
}
