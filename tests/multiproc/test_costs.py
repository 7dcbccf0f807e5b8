"""Work that a step must not do twice: casts of masters, copies of gradients, launches and collectives by tensor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import dmuon_runtime as dmuon
from dmuon_runtime import ledger
from dmuon_runtime.pieces import Piece
from dmuon_runtime.runtime import find_runtime
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, dedicate
from tests.multiproc.models import POLICY, batch, lm_loss, make

HALF: dict[str, object] = {**POLICY, "defaults": {**POLICY["defaults"], "param_dtype": torch.bfloat16}}  # type: ignore[dict-item]


class _Casts(TorchDispatchMode):
    """Counts elements that are cast from float32 to bfloat16 out of masters."""

    def __init__(self, masters: set[int]) -> None:
        super().__init__()
        self.elements = 0
        self._masters = masters

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else None
        target = args[0].dtype if name == "copy_" else (kwargs or {}).get("dtype")
        if source is not None and target == torch.bfloat16 and source.untyped_storage().data_ptr() in self._masters:
            self.elements += source.numel()
        return func(*args, **(kwargs or {}))


def _casts_of_a_step(reshard: bool) -> tuple[int, int]:
    """Return elements of masters on this rank, and how many were cast in a step after the first."""
    run = dedicate(make(dtype=torch.float32), Setting(reshard=reshard, policy=HALF))
    units = find_runtime(run.model).schedule.units
    masters = [bucket.master for unit in units for bucket in unit.buckets if bucket.master is not None]
    for step in range(2):
        with _Casts({master.untyped_storage().data_ptr() for master in masters}) as casts:
            lm_loss(run.model, batch(step, dist.get_rank())).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    return sum(master.numel() for master in masters), casts.elements


def _costs() -> None:
    owned, in_z2 = _casts_of_a_step(reshard=False)
    assert in_z2 == owned, "kept until the backward is done, weights are cast once a step"
    owned, in_z3 = _casts_of_a_step(reshard=True)
    assert owned < in_z3 <= 2 * owned, "freed in between, once for each time that they are needed, and never else"
    run = dedicate(make(), Setting())
    lm_loss(run.model, batch(0, dist.get_rank())).backward()
    before = dmuon.get_counters(run.model).snapshot()
    dmuon.clip_grad_norm_(run.optimizer, 1.0)
    clipped = dmuon.get_counters(run.model).snapshot()
    assert clipped.control.collectives - before.control.collectives <= 2, "one agreement and one norm, for all tensors"
    for piece in run.optimizer.pieces:
        _holds_no_copy(piece)


def _holds_no_copy(piece: Piece) -> None:
    assert piece.bucket.gradient is not None
    own, whole = piece.gradient.untyped_storage(), piece.bucket.gradient.untyped_storage()
    assert own.data_ptr() == whole.data_ptr(), "what was reduced is what the update reads"


@pytest.mark.multiproc
def test_nothing_is_cast_copied_or_agreed_twice() -> None:
    run_ranks(2, _costs)


def test_equal_short_sides_share_their_launches() -> None:
    """Eight matrices, of two shapes, launch as many n by n products as one, and one more for the other shape."""

    def launched(shapes: list[tuple[int, int]]) -> int:
        ns = dmuon.NewtonSchulz(kernel="blocked")
        before: Counter[str] = Counter({str(key): count.launches for key, count in ledger.snapshot().items()})
        ns.orthogonalize([torch.randn(shape) for shape in shapes], 5)
        return sum(count.launches for count in ledger.snapshot().values()) - before.total()

    one = launched([(16, 48)])
    assert one > 0
    assert launched([(16, 48)] * 8) == one
    long_products = 2  # X X^T at the start and at the restart, for each shape
    assert launched([(16, 48)] * 4 + [(64, 16)] * 4) == one + long_products
