"""All ranks obey at the same step."""

from __future__ import annotations

import pytest
import torch

from tests.worker.gang import run_gang
from worker.contract.kernels import Kernel, KernelPolicy, KernelTarget, SwapOrder
from worker.control import Agreement, Directive, Mailbox


def test_a_directive_survives_its_encoding() -> None:
    for tripped in [frozenset[Kernel](), frozenset({Kernel.QUACK}), frozenset(Kernel)]:
        for stop in (False, True):
            directive = Directive(KernelPolicy(epoch=1 << 40, tripped=tripped), stop)
            assert Directive.decode(directive.encode()) == directive


def test_a_directive_carries_breakers_resets_and_a_swap() -> None:
    for target in (
        {"kernel": "blocked"}, {"algorithm": "direct"}, {"kernel": "auto", "algorithm": "gram", "coefficients": "you"},
    ):  # fmt: skip
        swap = SwapOrder(number=9, target=KernelTarget.model_validate(target), deadline_s=0.25)
        policy = KernelPolicy(
            epoch=9, disabled=frozenset({Kernel.BLOCKED}), metrics_only=frozenset({Kernel.QUACK}),
            resets={Kernel.BLOCKED: 7, Kernel.CUTE_SM80: 1 << 40}, swap=swap,
        )  # fmt: skip
        encoded = Directive(policy, False).encode()
        assert bool((encoded >= 0).all()), "ranks that say nothing say zero: the greatest is rank 0's"
        decoded = Directive.decode(torch.cat([encoded, torch.tensor([-3, 5])]))
        assert (decoded.policy, decoded.heard) == (policy, (-3, 5))


def test_an_older_policy_is_ignored() -> None:
    mailbox = Mailbox(KernelPolicy(epoch=3))
    mailbox.set_kernels(KernelPolicy(epoch=2, tripped=frozenset({Kernel.BLOCKED})))
    assert mailbox.read().policy == KernelPolicy(epoch=3)


def test_alone_a_message_counts_from_the_step_after_the_next() -> None:
    mailbox = Mailbox()
    agreement = Agreement(mailbox, timeout_s=1)
    assert not agreement.next(last=False).stop
    mailbox.stop()
    assert [agreement.next(last=False).stop for _ in range(2)] == [False, True]


def _member(rank: int, addresses: list[str]) -> list[tuple[int, list[str], bool]]:
    import torch.distributed as dist

    from worker.rendezvous import connect_store, join_group, leave_group

    join_group(connect_store(addresses[0], 30), rank, 2, torch.device("cpu"), join_timeout_s=30, timeout_s=30)
    mailbox = Mailbox()
    agreement = Agreement(mailbox, timeout_s=30)
    seen: list[tuple[int, list[str], bool]] = []
    for step in range(12):
        if step == 3 and rank == 0:
            mailbox.set_kernels(KernelPolicy(epoch=1, tripped=frozenset({Kernel.BLOCKED})))
        if step == 4 and rank == 1:
            mailbox.stop()  # only rank 0's mailbox counts
        if step == 6 and rank == 0:
            mailbox.stop()
        directive = agreement.next(last=step == 11)
        seen.append((directive.policy.epoch, sorted(directive.policy.tripped), directive.stop))
        if directive.stop:
            break
        dist.barrier()
    leave_group()
    return seen


@pytest.mark.multiproc
def test_two_ranks_change_and_stop_together() -> None:
    seen = run_gang(2, _member)
    assert seen[0] == seen[1]
    assert seen[0] == [(0, [], False)] * 4 + [(1, ["blocked"], False)] * 3 + [(1, ["blocked"], True)]
