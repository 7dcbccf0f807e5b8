"""Which kernel a policy leaves, and that a change is told with its epoch and step."""

from __future__ import annotations

import pytest
import torch

from dmuon_runtime import ledger
from worker.contract.kernels import Kernel, KernelPolicy
from worker.contract.spec import KernelsSpec
from worker.kernels import KernelSwitch, decide_kernel, launched_kernel, make_newton_schulz

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("configured", "detected", "tripped", "expected"),
    [
        (Kernel.AUTO, Kernel.QUACK, set(), Kernel.AUTO),
        (Kernel.AUTO, Kernel.QUACK, {Kernel.QUACK}, Kernel.CUBLAS),
        (Kernel.AUTO, Kernel.CUBLAS, {Kernel.QUACK}, Kernel.AUTO),
        (Kernel.BLOCKED, Kernel.CUBLAS, {Kernel.BLOCKED}, Kernel.CUBLAS),
        (Kernel.BLOCKED, Kernel.CUBLAS, {Kernel.QUACK}, Kernel.BLOCKED),
    ],
)
def test_a_tripped_kernel_gives_way(
    configured: Kernel, detected: Kernel, tripped: set[Kernel], expected: Kernel
) -> None:
    assert decide_kernel(configured, detected, KernelPolicy(tripped=frozenset(tripped))) == expected


def test_a_switch_changes_once_for_each_epoch() -> None:
    switch = KernelSwitch(KernelsSpec(kernel=Kernel.BLOCKED), CPU, KernelPolicy())
    assert switch.kernel == "blocked"
    assert switch.apply(KernelPolicy(), 1) is None
    tripped = KernelPolicy(epoch=2, tripped=frozenset({Kernel.BLOCKED}))
    note = switch.apply(tripped, 7)
    assert note is not None and note.name == "kernel_changed"
    assert note.data == {"epoch": 2, "step": 7, "kernel": "cublas", "previous": "blocked"}
    assert (switch.kernel, switch.epoch, switch.apply(tripped, 8)) == ("cublas", 2, None)
    back = switch.apply(KernelPolicy(epoch=3), 9)
    assert back is not None and switch.kernel == "blocked"


def test_an_attempt_may_begin_with_a_tripped_kernel() -> None:
    policy = KernelPolicy(epoch=5, tripped=frozenset({Kernel.BLOCKED}))
    assert KernelSwitch(KernelsSpec(kernel=Kernel.BLOCKED), CPU, policy).kernel == "cublas"


def test_what_was_launched_is_read_from_the_ledger() -> None:
    before = ledger.snapshot()
    assert launched_kernel(before, ledger.snapshot()) is None
    ns = make_newton_schulz(KernelsSpec(kernel=Kernel.BLOCKED), Kernel.BLOCKED)
    ns.sample_next = True
    ns.orthogonalize([torch.eye(4, 8)])
    assert launched_kernel(before, ledger.snapshot()) == "blocked"
    assert ns.last_error is not None and 0 <= ns.last_error < 0.5 and not ns.sample_next
