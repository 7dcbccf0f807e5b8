"""Models and batches of the step benchmarks: Llama by transformers, random weights, random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A Llama and the batch of one rank: ``batch`` sequences of ``sequence`` tokens."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    sequence: int
    tied: bool = False

    def build(self, device: torch.device) -> nn.Module:
        """Return the model in float32 on ``device``, the same weights on every rank."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.mlp, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocabulary,
            max_position_embeddings=self.sequence, tie_word_embeddings=self.tied, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        with device:
            model: nn.Module = LlamaForCausalLM(config)
        return model.train()

    def with_batch(self, batch: int | None) -> Workload:
        """Return the same with ``batch`` sequences of a rank; None changes nothing."""
        return self if batch is None else replace(self, batch=batch)

    def num_elements(self) -> int:
        """Return how many weights the model has."""
        return sum(parameter.numel() for parameter in self.build(torch.device("meta")).parameters())

    def tokens(self, step: int, rank: int, device: torch.device) -> Tensor:
        """Return the batch of a step, int64 [batch, sequence]."""
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        shape = (self.batch, self.sequence)
        return torch.randint(0, self.vocabulary, shape, generator=generator).to(device, non_blocking=True)


WORKLOADS: Mapping[str, Workload] = {
    "llama": Workload(2048, 8192, 16, 16, 16, 32_000, 8, 2048),
    "small-matrices": Workload(768, 3072, 12, 12, 12, 50_304, 16, 1024),
    "llama-3.2-3b": Workload(3072, 8192, 28, 24, 8, 128_256, 2, 2048, tied=True),
    "llama-3.1-8b": Workload(4096, 14336, 32, 32, 8, 128_256, 1, 2048),
    "llama-small": Workload(1024, 4096, 8, 16, 16, 256, 32, 512),
    "cpu": Workload(256, 1024, 4, 4, 4, 512, 4, 128),
    "tiny": Workload(64, 128, 2, 4, 4, 512, 2, 32),
    "host": Workload(64, 128, 12, 4, 4, 512, 1, 16),
}
"""``llama`` is that of the measured figures in the design's reference; ``cpu`` and ``tiny`` are for machines without a
GPU. ``llama-small`` is the job of the end-to-end scripts. ``host`` has the layers of ``small-matrices`` and next to
nothing to compute: what is left is the host's own work.
"""
