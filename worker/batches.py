"""The tokens that one rank reads in one step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from worker.contract.spec import JobSpec
from worker.corpus import Corpus
from worker.sampler import sample_index, worker_positions

__all__ = ["micro_batches", "num_micro_batches"]


def num_micro_batches(spec: JobSpec) -> int:
    """Return how many forwards a worker does in one step."""
    share = spec.training.global_batch // spec.world_size
    return share // (spec.training.micro_batch or share)


def micro_batches(
    spec: JobSpec, corpus: Corpus, rank: int, step: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, int64 [micro batch, sequence_length] each, targets one token ahead."""
    length = corpus.sequence_length
    positions = worker_positions(rank, spec.world_size, spec.training.global_batch)
    size = len(positions) // num_micro_batches(spec)
    for begin in range(0, len(positions), size):
        samples = [
            sample_index(spec.data.seed, step, position, spec.training.global_batch, corpus.num_samples)
            for position in positions[begin : begin + size]
        ]
        rows = np.stack([corpus.tokens[sample * length : sample * length + length + 1] for sample in samples])
        tokens = torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
        yield tokens[:, :-1], tokens[:, 1:]
