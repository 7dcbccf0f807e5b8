"""An exception that all ranks meet in a forward or backward leaves nothing behind once it is handled."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, hold_to_reference
from tests.multiproc.models import batch, lm_loss
from tests.multiproc.test_equality import plain_backward

pytestmark = pytest.mark.multiproc


class Planted(Exception):
    """Raised on purpose."""


def _fail(*_: object) -> None:
    raise Planted


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


def test_training_goes_on_after_an_exception() -> None:
    """A forward that raises and a backward that raises, on all ranks, then a good step."""
    run_ranks(2, _laws)
