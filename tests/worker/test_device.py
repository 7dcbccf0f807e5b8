"""Which device a rank gets, and how ranks share one."""

from __future__ import annotations

import os

import pytest
import torch

from tests.worker.specs import tiny_spec
from worker.contract.spec import JobSpec
from worker.device import decide_device
from worker.settings import share_gpu


def spec_of(gpus: float) -> JobSpec:
    return tiny_spec(2, resources={"gpus_per_worker": gpus})


def test_a_gpu_of_its_own_or_a_part_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide_device(spec_of(0), 3) == torch.device("cpu")
    with pytest.raises(RuntimeError, match="asks for 1 GPUs a worker, but this process sees none"):
        decide_device(spec_of(1), 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [decide_device(spec_of(0.5), index).index for index in range(4)] == [0, 1, 0, 1]
    assert [decide_device(spec_of(1), index).index for index in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match=r"this machine has 2 and this is worker 2.*below 1 to share"):
        decide_device(spec_of(1), 2)


def test_nccl_takes_ranks_of_one_device_for_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "kept")
    share_gpu(3)
    assert os.environ["NCCL_HOSTID"] == "kept", "an operator's own"
    monkeypatch.delenv("NCCL_HOSTID")
    share_gpu(3)
    assert os.environ.pop("NCCL_HOSTID") == "rank-3"


@pytest.mark.parametrize("gpus", [1.5, 2.25])
def test_more_than_one_gpu_are_whole_ones(gpus: float) -> None:
    with pytest.raises(
        ValueError, match=rf"part of one GPU \(below 1\) or whole ones, found {gpus:g}; take {int(gpus)}"
    ):
        spec_of(gpus)
