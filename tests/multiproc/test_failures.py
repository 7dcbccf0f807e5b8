"""An exception that all ranks meet in a forward or backward leaves nothing behind once it is handled."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

import dmuon_runtime as dmuon
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, hold_to_reference
from tests.multiproc.models import batch, lm_loss
from tests.multiproc.test_equality import plain_backward

pytestmark = pytest.mark.multiproc


class Planted(Exception):
    """Raised on purpose."""


def _fail(*_: object) -> None:
    raise Planted("on purpose")


def _loop(run: Run, setting: Setting) -> None:
    """Fail in a forward, then in a backward, before each good step."""
    block = run.model.get_submodule("layers.1")
    weight = run.model.get_parameter("layers.1.up.weight")
    for step in range(setting.steps):
        hook = block.register_forward_pre_hook(_fail)
        with pytest.raises(Planted):
            lm_loss(run.model, batch(step, dist.get_rank()))
        hook.remove()
        loss = lm_loss(run.model, batch(step, dist.get_rank()))
        tensor_hook = weight.register_hook(_fail)
        with pytest.raises(Planted):
            loss.backward()
        tensor_hook.remove()
        run.optimizer.zero_grad()
        plain_backward(run.model, step, dist.get_rank())
        run.optimizer.step()
        run.optimizer.zero_grad()


def _laws() -> None:
    for reshard in (True, False):
        hold_to_reference(plain_backward, Setting(steps=2, reshard=reshard), loop=_loop)


def _two_passes_and_a_step(run: Run, step: int) -> None:
    with dmuon.fail_together(run.model):
        for micro in range(2):
            lm_loss(run.model, batch(step, dist.get_rank(), micro)).backward()
        run.optimizer.step()


def _one_sided(replicas: int, storage: str, where: str) -> None:
    """One rank raises, in a forward or a backward; the others say so, and then all train on."""
    setting = Setting(steps=2, replicas=replicas, storage=storage)
    begin = time.monotonic()

    def loop(run: Run, setting: Setting) -> None:
        block, weight = run.model.get_submodule("layers.1"), run.model.get_parameter("layers.1.up.weight")
        for step in range(setting.steps):
            handle = None
            if dist.get_rank() == 1:
                register = block.register_forward_pre_hook if where == "forward" else weight.register_hook
                handle = register(_fail)
            expected = Planted if handle is not None else dmuon.PeerFailed
            with pytest.raises(expected) as found:
                _two_passes_and_a_step(run, step)
            if handle is not None:
                handle.remove()
            else:
                assert "rank 1 raised Planted: on purpose" in str(found.value)
            run.optimizer.zero_grad()
            plain_backward(run.model, step, dist.get_rank())
            run.optimizer.step()
            run.optimizer.zero_grad()

    hold_to_reference(plain_backward, setting, loop=loop)
    assert time.monotonic() - begin < 20, "nobody waited for the timeout of the group"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_alone_fails(where: str) -> None:
    """The others learn of it at once, with the rank and its error."""
    run_ranks(2, _one_sided, 1, "sharded", where)
    run_ranks(3, _one_sided, 1, "replicated", where)
    run_ranks(4, _one_sided, 2, "sharded", where)


def test_training_goes_on_after_an_exception() -> None:
    """A forward that raises and a backward that raises, on all ranks, then a good step."""
    run_ranks(2, _laws)
