"""Whether a CPU iterates in bfloat16: where it is asked for, and faster.

The request is torch's own: ``torch.set_float32_matmul_precision("medium")``, or bf16 as oneDNN's precision of products
(``torch.backends.mkldnn.matmul.fp32_precision``, which the former sets; unlike the former's own word it can be read
whichever way it was set). torch then rounds the operands of each float32 product to bfloat16. Kept in bfloat16 from
product to product they are rounded as often, and move half the bytes.

Note "Why nothing is timed". On 2 cores with AVX512_BF16 a bfloat16 product takes 0.5 of the time of a float32 one on
request, 0.2 to 0.3 of one without. But on a busy machine a few milliseconds of measurement said the opposite, and ranks
that must agree bit for bit would not have. What is asked here is the same in all processes of a machine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import torch

from dmuon_runtime.kernels._settings import onednn_limit

__all__ = ["decide_units", "iterates_in_bfloat16"]

_log = logging.getLogger(__name__)

UNITS: Final = ("avx512_bf16", "amx_bf16")
"""torch's names of what x86 processors multiply bfloat16 with. Arm's are left out: nothing was measured there."""
TOO_OLD: Final = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)  # fmt: skip
"""What oneDNN may be held to that multiplies bfloat16 at less than float32's speed."""


def iterates_in_bfloat16() -> bool:
    """Return whether float32 products on this CPU may be bfloat16's (asked anew at each call), and gain by it."""
    precision: object = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision == "bf16" and _has_units()


@lru_cache(maxsize=1)
def _has_units() -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    units = decide_units(torch.cpu.get_capabilities(), onednn_limit(), has_onednn)
    _log.info(
        "Newton-Schulz: bfloat16 products were asked for, and %s",
        f"run on {units}" if units else "float32 stays: neither AVX512_BF16 nor AMX can be used here",
    )
    return units is not None


def decide_units(capabilities: Mapping[str, object], limit: str | None, has_onednn: bool) -> str | None:
    """Return the units that make bfloat16 the faster dtype, or None.

    Args:
        capabilities: of the processor, as :func:`torch.cpu.get_capabilities` names them.
        limit: newest instructions that oneDNN may use, as ``ONEDNN_MAX_CPU_ISA`` names them; None for no limit.
        has_onednn: whether torch was built with oneDNN, which alone uses such units.
    """
    if not has_onednn or limit in TOO_OLD:
        return None
    return next((name for name in UNITS if capabilities.get(name)), None)
