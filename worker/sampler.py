"""Which text a step reads: a pure function of (seed, step, position in the global batch), whatever the workers.

An epoch visits every sample once, in an order that is a keyed permutation of 0..n-1: four Feistel rounds on the
smallest square of a power of two that holds n, walked until the result lies below n. No list of n entries exists.
"""

from __future__ import annotations

import hashlib

__all__ = ["permuted", "sample_index", "worker_positions"]

_ROUNDS = 4


def sample_index(seed: int, step: int, position: int, global_batch: int, num_samples: int) -> int:
    """Return the sample, in 0..num_samples-1, that ``position`` of the global batch reads in ``step``.

    Args:
        seed: of the data.
        step: counted from 0.
        position: in 0..global_batch-1.
        global_batch: samples of a step.
        num_samples: samples of an epoch.
    """
    epoch, offset = divmod(step * global_batch + position, num_samples)
    return permuted(offset, num_samples, _key(seed, epoch))


def worker_positions(rank: int, world_size: int, global_batch: int) -> range:
    """Return the positions of the global batch that ``rank`` reads."""
    assert global_batch % world_size == 0, "the spec was not validated"
    share = global_batch // world_size
    return range(rank * share, (rank + 1) * share)


def _key(seed: int, epoch: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=16).digest()


def permuted(index: int, size: int, key: bytes) -> int:
    """Return the place of ``index`` under the permutation of 0..size-1 that ``key`` names."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(right.to_bytes(8, "little"), digest_size=8, key=key, salt=bytes([number]))
            left, right = right, left ^ (int.from_bytes(digest.digest(), "little") & mask)
        index = (left << half_bits) | right
        if index < size:
            return index
