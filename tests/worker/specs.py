"""Specs that the tests of the worker share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker.contract.load import validate_spec
from worker.contract.spec import JobSpec

__all__ = ["TEXT", "tiny_document", "tiny_spec"]

TEXT = Path(__file__).parent / "text"
"""Multiplication tables in words, 13 kilobytes."""


def tiny_document(world_size: int = 1, **sections: Any) -> dict[str, Any]:
    """A Llama of 35 thousand parameters on :data:`TEXT`; ``sections`` replace whole ones."""
    return {
        "api_version": "v1",
        "name": "tiny",
        "model": {
            "type": "llama",
            "config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
        },
        "data": {"directory": str(TEXT), "sequence_length": 32},
        "mesh": {"shard": world_size},
        "training": {"steps": 5, "global_batch": 12, "clip_grad_norm": 1.0},
        "routing": {
            "overrides": [
                {"name": ["norm"], "set": {"route": "adamw"}},
                {"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}},
            ]
        },
        "resources": {"cpus_per_worker": 0.5},
    } | sections


def tiny_spec(world_size: int = 1, **sections: Any) -> JobSpec:
    """:func:`tiny_document`, validated."""
    return validate_spec(tiny_document(world_size, **sections))
