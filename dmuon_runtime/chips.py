"""Figures of chips and of the wires between them: the data of the cost model, each with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CHIPS", "H200", "ChipFigures", "chip_key", "find_chip"]


@dataclass(frozen=True, kw_only=True)
class ChipFigures:
    """What a GPU, its node and its network do. Seconds, bytes, FLOP/s."""

    name: str
    train_flops_per_s: float
    """Model FLOPs (6 for each weight and token, and attention scores) that a training step does while it computes."""
    memory_bytes_per_s: float
    """Memory traffic of elementwise updates."""
    ns_group_s: float
    """One Newton-Schulz group of no size: its launches."""
    ns_flops_per_s: float
    """Newton-Schulz FLOPs, symmetric products charged half."""
    ns_element_s: float
    """Casting, normalising and writing one element of a matrix."""
    ns_burst_s: float
    """How long Newton-Schulz goes at that rate in a step, before the chip lowers its clocks."""
    ns_sustained_ratio: float
    """What the same work takes after that, over what it took before."""
    gpus_per_node: int
    node_bytes_per_s: float
    """One collective's bytes through a GPU, within a node."""
    network_bytes_per_s: float
    """The same between nodes, through the one network card that a GPU has."""
    collective_s: float
    """A collective of no size, within a node."""
    node_hop_s: float
    """What each further rank of a node adds to a ring."""
    network_hop_s: float
    """What each further node adds to a ring."""
    assumed: tuple[str, ...] = ()
    """Fields that nobody measured here."""


H200 = ChipFigures(
    name="nvidia-h200",
    # FSDP2 + AdamW on 2 GPUs, 16 layers of 2048/8192, 16 384 tokens a GPU: 118.6 TFLOP in the 319.2 ms of its step,
    # less 5.1 of AdamW and 2.4 of communication that this model says is waited for.
    train_flops_per_s=380.5e12,
    # The fused AdamW of the same run: 602.5 million elements of 28 bytes in 5.1 ms.
    memory_bytes_per_s=3.3e12,
    # Least squares of relative errors over the 16 cases of benchmarks/results/newton_schulz-nvidia-h200.json that name
    # shapes alone (python -m benchmarks.cost_model --fit).
    ns_group_s=64.8e-6,
    ns_flops_per_s=754e12,
    ns_element_s=8.53e-12,
    # By eye from those cases, which take up to 15 ms; the ratio from "Llama-3-8B, 1 of 8 ranks" in the same file.
    ns_burst_s=15e-3,
    ns_sustained_ratio=1.2,
    gpus_per_node=8,
    # NCCL all-reduce of 1 GiB on 2 GPUs.
    node_bytes_per_s=328e9,
    # A 400 Gbit/s card for each GPU, nine tenths of it used.
    network_bytes_per_s=45e9,
    collective_s=15e-6,
    node_hop_s=2e-6,
    network_hop_s=8e-6,
    assumed=("gpus_per_node", "network_bytes_per_s", "collective_s", "node_hop_s", "network_hop_s"),
)

CHIPS: Mapping[str, ChipFigures] = {H200.name: H200}


def chip_key(device_name: str) -> str:
    """Return the key of a device that torch calls ``device_name``."""
    return device_name.lower().replace(" ", "-")


def find_chip(name: str) -> ChipFigures:
    """Return the figures of a chip.

    Raises:
        ValueError: there are none; it lists the chips that have some.
    """
    found = CHIPS.get(chip_key(name))
    if found is None:
        raise ValueError(f"there are no figures of chip {name!r}; there are of {', '.join(sorted(CHIPS))}")
    return found
