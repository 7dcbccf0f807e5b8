"""Which device a rank gets, and how ranks share one."""

from __future__ import annotations

import os

import pytest
import torch

from tests.worker.specs import tiny_spec
from worker.contract.spec import JobSpec
from worker.device import decide_device
from worker.settings import prepare_for_gpu


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


def test_the_environment_of_a_rank_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"NCCL_HOSTID": "kept", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    monkeypatch.setattr(os, "environ", dict(own))
    prepare_for_gpu(3, shares_it=True)
    assert os.environ == own, "an operator's own"
    os.environ.clear()
    prepare_for_gpu(3, shares_it=False)
    assert os.environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    prepare_for_gpu(3, shares_it=True)
    assert os.environ["NCCL_HOSTID"] == "rank-3", "NCCL takes ranks of one device for hosts"


@pytest.mark.parametrize("gpus", [1.5, 2.25])
def test_more_than_one_gpu_are_whole_ones(gpus: float) -> None:
    with pytest.raises(
        ValueError, match=rf"part of one GPU \(below 1\) or whole ones, found {gpus:g}; take {int(gpus)}"
    ):
        spec_of(gpus)


@pytest.mark.parametrize("resources", [{"gpus_per_worker": 1e-5}, {"cpus_per_worker": 1e-5}])
def test_less_than_ray_can_reserve_is_refused(resources: dict[str, float]) -> None:
    (name,) = resources
    with pytest.raises(ValueError, match=rf"{name}.*0\.0001"):
        tiny_spec(2, resources=resources)
    assert getattr(tiny_spec(2, resources={name: 1e-4}).resources, name) == 1e-4
