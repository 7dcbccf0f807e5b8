"""What the end-to-end script runs on GPUs and on CPUs: sizes, kernels, tolerances, and the document of a job."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from worker.contract.kernels import Kernel

__all__ = ["Plan", "decide_plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run where."""

    cpu: bool
    sizes: tuple[int, int]
    """Workers of the first job, and of the one that continues it."""
    kernels: tuple[Kernel, Kernel]
    """What the job begins with, and what it is swapped to and back from."""
    loss_tolerance: float
    """Largest relative difference between the losses of one step on different numbers of workers; in bfloat16 the
    rounding of each differs, and grows from step to step."""
    first_loss_tolerance: float
    """The same for the first step after a checkpoint, whose weights are the same."""
    gpus_per_worker: float = 0.0

    def gpus(self, workers: int) -> int:
        """Return how many GPUs as many workers have."""
        return math.ceil(workers * self.gpus_per_worker)

    def spec(self, name: str, workers: int, resume: str | None = None) -> str:
        """Return the document of a job that runs until it is stopped."""
        small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
        config = dict(small if self.cpu else large)
        config["num_key_value_heads"] = config["num_attention_heads"]
        length = 32 if self.cpu else 512
        document: dict[str, Any] = {
            "api_version": "v1",
            "name": name,
            "model": {"type": "llama", "config": config | {"max_position_embeddings": length}},
            "data": {"sequence_length": length, "seed": 1},
            "mesh": {"shard": workers},
            "training": {
                "steps": 100_000,
                "global_batch": 8 if self.cpu else 32,
                "clip_grad_norm": 1.0,
                "precision": "float32" if self.cpu else "bfloat16",
                "seed": 1,
            },
            "optimizer": {"kind": "dmuon", "muon": {"lr": 0.01}, "adamw": {"lr": 1e-3}},
            "routing": {
                "defaults": {"route": "muon"},
                "overrides": [
                    {"name": ["norm"], "set": {"route": "adamw"}},
                    {"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}},
                ],
            },
            "kernels": {"kernel": self.kernels[0]},
            "resources": {"cpus_per_worker": 1 if self.cpu else 2, "gpus_per_worker": self.gpus_per_worker},
        }
        if resume is not None:
            document["checkpoint"] = {"resume": resume}
        return json.dumps(document)


def decide_plan(workers: int, *, cpu: bool, share: bool = False) -> Plan:
    """Return the plan for ``workers`` workers (1 or 2), which ``share`` one GPU or have one each."""
    sizes = (2, 1) if workers == 2 else (1, 1)
    if cpu:
        return Plan(True, sizes, (Kernel.BLOCKED, Kernel.CUBLAS), 1e-3, 1e-5)
    return Plan(False, sizes, (Kernel.QUACK, Kernel.CUBLAS), 0.04, 0.005, 1 / workers if share else 1.0)
