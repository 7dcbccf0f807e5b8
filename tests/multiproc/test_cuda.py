"""The laws on CUDA with NCCL, and that a step never makes the host wait for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon_runtime as dmuon
from dmuon_runtime.breaker import Thresholds
from dmuon_runtime.guard import KernelGuard
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, bfloat16_law, dedicate, device_type, hold_to_reference, world_mesh
from tests.multiproc.models import make
from tests.multiproc.test_calls import DIVERGENT, calling
from tests.multiproc.test_equality import plain_backward
from tests.multiproc.test_gradients import accumulation_laws, non_finite_laws
from tests.multiproc.test_random import programs
from worker.kernels import SampledNewtonSchulz

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")]
WORLDS = [1, 2, 4] if NUM_GPUS >= 4 else [1, 2]
"""Two ranks share the device where there is one: see ``claim_device``."""


def _equality() -> None:
    for reshard in (True, False):
        hold_to_reference(plain_backward, Setting(reshard=reshard, max_norm=0.5))
        hold_to_reference(calling(DIVERGENT), Setting(reshard=reshard), lambda: make("saved"))
    hold_to_reference(plain_backward, Setting(group_policy="shared"))


@pytest.mark.parametrize("world_size", WORLDS)
def test_laws_hold(world_size: int) -> None:
    """Equality, different calls on each rank, random programs, and steps skipped on the device."""
    run_ranks(world_size, _equality, backend="nccl", deadline_s=120)
    run_ranks(world_size, programs, [1, 2, 3], "plain", backend="nccl", deadline_s=120)
    if world_size > 1:
        run_ranks(world_size, non_finite_laws, backend="nccl", deadline_s=120)


def _modes() -> list[Setting]:
    grids = [Setting(replicas=2), Setting(replicas=2, group_policy="shared")] if dist.get_world_size() > 1 else []
    return [Setting(storage="replicated"), *grids]


def _replicas() -> None:
    for base in _modes():
        for reshard in (True, False):
            hold_to_reference(plain_backward, replace(base, reshard=reshard, max_norm=0.5))
            hold_to_reference(calling(DIVERGENT), replace(base, reshard=reshard), lambda: make("saved"))
        expected = dmuon.get_model_state_dict(hold_to_reference(plain_backward, base).model)
        waited = hold_to_reference(plain_backward, replace(base, replicate_async=False))
        assert all(torch.equal(expected[name], v) for name, v in dmuon.get_model_state_dict(waited.model).items())
        if dist.get_world_size() > 1:
            non_finite_laws(replace(base, steps=2))


@pytest.mark.parametrize("world_size", WORLDS)
def test_replicas_and_replicated_storage(world_size: int) -> None:
    """Equality, waiting and not waiting for publications, steps skipped on the device, shared groups."""
    run_ranks(world_size, _replicas, backend="nccl", deadline_s=120)


def _accumulation_and_bfloat16() -> None:
    accumulation_laws(Setting(steps=2))
    for setting in (Setting(), Setting(reshard=False), *_modes()):
        bfloat16_law(setting)


@pytest.mark.parametrize("world_size", WORLDS[1:])
def test_accumulation_and_bfloat16(world_size: int) -> None:
    """Every form of accumulation to one process; bfloat16 compute has the losses of one rank with all the data."""
    run_ranks(world_size, _accumulation_and_bfloat16, backend="nccl", deadline_s=120)


def _no_synchronisation() -> None:
    for setting in (Setting(), *_modes()):
        _no_synchronisation_in(setting)


def _no_synchronisation_in(setting: Setting) -> None:
    run = dedicate(make(dtype=torch.float32), setting)
    tokens = torch.randint(0, 13, (3, 7), device="cuda")
    for step in range(4):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        logits = run.model(tokens)
        logits.square().mean().backward()
        norm = dmuon.clip_grad_norm_(run.optimizer, 1.0)
        run.optimizer.step()
        outcome = run.optimizer.last_step
        assert outcome is not None
        outcome.send()
        run.optimizer.zero_grad()
        dmuon.get_counters(run.model).snapshot()
    torch.cuda.set_sync_debug_mode("default")
    assert outcome.grad_norm == pytest.approx(float(norm)) and outcome.offenders == ()
    for route, (square_sum, _) in outcome.updates.items():
        assert square_sum == float(outcome.updates_by_route[route].square_sum(norm.device)), "as sent behind the step"
    with torch.no_grad():
        run.model(tokens)  # waits for what the last step published
    dmuon.get_counters(run.model).settle()
    counted = dmuon.get_counters(run.model).snapshot()
    assert counted.pending_spans == 0
    assert counted.owner_compute_seconds > 0
    if dist.get_world_size() > 1:
        assert all(0 <= item.exposed_seconds <= item.seconds > 0 for item in counted.comm.values())
        print({key: (item.seconds, item.exposed_seconds) for key, item in counted.comm.items()})


@pytest.mark.parametrize("world_size", WORLDS)
def test_step_does_not_synchronise(world_size: int) -> None:
    """Forward, backward, clip, step, zero_grad and a snapshot under torch's synchronisation check."""
    run_ranks(world_size, _no_synchronisation, backend="nccl", deadline_s=120)


def _stable_memory() -> None:
    for setting in (Setting(max_norm=0.5), *_modes()):
        run = dedicate(make(dtype=torch.float32), setting)
        tokens = torch.randint(0, 13, (3, 7), device="cuda")
        allocated: dict[int, int] = {}
        for step in range(200):
            run.model(tokens).square().mean().backward()
            dmuon.clip_grad_norm_(run.optimizer, 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()
            if step in (20, 199):
                torch.cuda.synchronize()
                dmuon.get_counters(run.model).snapshot()
                allocated[step] = torch.cuda.memory_allocated()
        assert allocated[199] <= allocated[20], allocated


@pytest.mark.parametrize("world_size", WORLDS)
def test_memory_is_stable(world_size: int) -> None:
    """Two hundred steps keep no byte more than twenty, in every mode."""
    run_ranks(world_size, _stable_memory, backend="nccl", deadline_s=120)


class Wide(nn.Module):
    """Matrices large enough for every kernel, captured graphs and the Gram form."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 512] to the same."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def real_kernels_in_a_step(*stretches: int) -> None:
    """After the first stretch of steps nothing waits for the device, and nothing more is held; under a guard."""
    torch.manual_seed(0)
    device, guard = torch.device(device_type()), KernelGuard(Thresholds(slow_factor=1e6))  # ranks may share a GPU
    on_gpu, held = device.type == "cuda", list[int]()
    model, newton_schulz = Wide().to(device), SampledNewtonSchulz()
    dmuon.dedicate_params(model, world_mesh(), lambda name, parameter: True)
    newton_schulz.guard = guard
    optimizer = dmuon.Muon(model, lr=1e-3, ns_backend=newton_schulz)
    x = torch.randn(16, 512, device=device)
    for number, steps in enumerate(stretches):
        if on_gpu:
            torch.cuda.set_sync_debug_mode("error" if number else "default")
        for step in range(steps):
            newton_schulz.sample_next = step % 10 == 0
            model(x).square().mean().backward()
            dmuon.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dmuon.get_counters(model).snapshot()
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert not guard.findings and guard.fallback_steps == 0
    assert newton_schulz.last_error is not None and 0 < newton_schulz.last_error < 2, "gradients lack rank"
    if on_gpu:
        assert held[-1] <= held[0], held
        assert len(newton_schulz._graphs) > 0 and newton_schulz._graphs.num_refused == 0


@pytest.mark.parametrize("world_size", WORLDS)
def test_real_kernels_neither_synchronise_nor_grow(world_size: int) -> None:
    """What ``auto`` launches, in graphs and under a guard, as a job has it."""
    run_ranks(world_size, real_kernels_in_a_step, 20, 180, backend="nccl", deadline_s=120)
