"""Random numbers of a step: a pure function of (seed, step, rank), so that no generator's state needs to be kept."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["seed_step"]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch on the host and on every device: a resumed run draws what an unbroken one draws; ranks differ.

    Args:
        seed: of the training.
        step: counted from 0.
        rank: global.
    """
    digest = hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
