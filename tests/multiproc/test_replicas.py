"""The laws with replicas (a grid of 2 by 2) and with replicated storage: equality, traffic, order, memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon_runtime as dmuon
from dmuon_runtime import ledger
from dmuon_runtime.runtime import find_runtime
from dmuon_runtime.transport import Handle
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, assert_traffic, dedicate, hold_to_reference, meshes
from tests.multiproc.models import POLICY, batch, lm_loss, make
from tests.multiproc.test_calls import DIVERGENT, calling
from tests.multiproc.test_equality import plain_backward
from tests.multiproc.test_gradients import (
    accumulation_laws,
    clearing_laws,
    missing_laws,
    non_finite_laws,
    norm_law,
)
from tests.multiproc.test_random import programs

pytestmark = pytest.mark.multiproc

FP32: dict[str, object] = {"overrides": POLICY["overrides"]}
MODES = [(4, 2, "sharded"), (3, 1, "replicated")]
"""World size, replicas, storage."""


def _setting(replicas: int, storage: str, **more: object) -> Setting:
    return Setting(replicas=replicas, storage=storage, **more)  # type: ignore[arg-type]


def _single(replicas: int, storage: str, **more: object) -> Run:
    setting = _setting(replicas, storage, policy=FP32, tolerance=1e-6, **more)
    return hold_to_reference(plain_backward, setting, lambda: make(dtype=torch.float32))


def _equality(replicas: int, storage: str) -> None:
    """Equal to one process, exact traffic; synchronous publishing, Z2 and shared groups change no bit."""
    run = _single(replicas, storage)
    assert_traffic(run, 3)
    expected = dmuon.get_model_state_dict(run.model)
    for more in ({"replicate_async": False}, {"reshard": False}, {"group_policy": "shared"}):
        other = _single(replicas, storage, **more)
        assert_traffic(other, 3)
        found = dmuon.get_model_state_dict(other.model)
        differing = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        assert not differing, f"{more} changes {differing}"
    norms = hold_to_reference(plain_backward, _setting(replicas, storage, max_norm=0.5))
    assert norms.optimizer.last_step is not None and not norms.optimizer.last_step.skipped


@pytest.mark.parametrize(("world_size", "replicas", "storage"), [*MODES, (2, 2, "sharded"), (1, 1, "replicated")])
def test_weights_equal_one_process(world_size: int, replicas: int, storage: str) -> None:
    """A grid of 2 by 2, two replicas of one shard, and replicated storage on 3 ranks and on 1."""
    run_ranks(world_size, _equality, replicas, storage, deadline_s=100)


def _calls(replicas: int, storage: str) -> None:
    for mode, reshard in itertools.product(("plain", "tuple", "reentrant", "saved"), (True, False)):
        setting = _setting(replicas, storage, reshard=reshard)
        hold_to_reference(calling(DIVERGENT), setting, lambda mode=mode: make(mode))  # type: ignore[misc]
    hold_to_reference(calling(DIVERGENT), _setting(replicas, storage, group_policy="shared"))
    programs([1, 2, 5], "plain", _setting(replicas, storage))
    programs([3], "saved", _setting(replicas, storage, replicate_async=False))


@pytest.mark.parametrize(("world_size", "replicas", "storage"), MODES)
def test_ranks_differ_in_what_they_run(world_size: int, replicas: int, storage: str) -> None:
    """Blocks skipped and repeated differently on each rank, with checkpointing, and random programs."""
    run_ranks(world_size, _calls, replicas, storage, deadline_s=150)


def _gradients(replicas: int, storage: str) -> None:
    setting = _setting(replicas, storage, steps=2)
    for law in (accumulation_laws, missing_laws, clearing_laws, non_finite_laws, norm_law):
        law(setting)
    accumulation_laws(replace(setting, reshard=False, replicate_async=False))


@pytest.mark.parametrize(("world_size", "replicas", "storage"), MODES)
def test_gradients_missing_local_and_cleared(world_size: int, replicas: int, storage: str) -> None:
    """All forms of accumulation, frozen and tied weights, zero_grad, and steps that are skipped."""
    run_ranks(world_size, _gradients, replicas, storage, deadline_s=150)


class Rows(nn.Module):
    """Matrices whose rows no number of ranks divides, each with a bias of as many elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(16, rows) for rows in (1, 2, 3, 5, 6, 7, 9, 10, 14, 15))
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=0.3, std=0.3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs side by side."""
        return torch.cat([torch.tanh(layer(x)) for layer in self.layers], dim=-1)


def _rows_backward(model: nn.Module, step: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(4, 16, generator=generator, dtype=torch.float64)).square().mean().backward()


ROWS: dict[str, object] = {
    "defaults": {"master_dtype": "float64", "optim_dtype": "float64"},
    "overrides": [
        {"name": "bias", "set": {"route": "sharded_adamw"}},
        {"name": "layers.0.weight", "set": {"route": "adamw"}},
    ],
}


def _uneven(replicas: int, storage: str) -> None:
    run = hold_to_reference(_rows_backward, _setting(replicas, storage, policy=ROWS), Rows)
    assert_traffic(run, 3)


@pytest.mark.parametrize(
    ("world_size", "replicas", "storage"),
    [(2, 1, "sharded"), (3, 1, "sharded"), (4, 1, "sharded"), (4, 2, "sharded"), (3, 1, "replicated")],
)
def test_rows_that_no_world_divides(world_size: int, replicas: int, storage: str) -> None:
    """1, 2, 3, 5, 6, 7, 9, 10, 14 and 15 rows; ranks that own nothing take part and orthogonalise nothing."""
    run_ranks(world_size, _uneven, replicas, storage)


def _lone() -> None:
    """One matrix on four ranks: three own nothing, take part in all that is due, and orthogonalise nothing."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    before = model.weight.detach().clone()
    mesh, replicate_mesh = meshes(2)
    dmuon.dedicate_params(model, mesh, lambda *_: True, replicate_mesh=replicate_mesh)
    optimizer = dmuon.Muon(model)
    start = sum(count.matrices for count in ledger.snapshot().values())
    for step in range(2):
        model(torch.randn(3, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    matrices: list[int | None] = [None] * 4
    dist.all_gather_object(matrices, sum(count.matrices for count in ledger.snapshot().values()) - start)
    assert sorted(count or 0 for count in matrices) == [0, 0, 0, 2]
    state = dmuon.get_model_state_dict(model)["weight"]
    assert state.isfinite().all() and not torch.equal(state, before)


def test_ranks_without_work_do_none() -> None:
    """Counted where it is launched."""
    run_ranks(4, _lone)


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _kept(run: Run) -> list[Tensor]:
    """What stays between steps; step counters are left out, as in the plan."""
    tensors = [value for state in run.optimizer.state.values() for value in state.values() if value.dim()]
    for unit in find_runtime(run.model).schedule.units:
        for bucket in unit.buckets:
            tensors += [tensor for tensor in (bucket.master, bucket.copy, bucket.flat) if tensor is not None]
    return tensors


def _bytes_kept(run: Run) -> int:
    """Optimizer state of a shard covers its elements, not the bucket's padding."""
    return sum(_sizes(_kept(run)).values())


def _unplanned(run: Run) -> list[int]:
    """Bytes of what else is alive between steps, beyond flags, norms and counters; a matrix has 480 bytes or more."""
    gc.collect()
    alive = _sizes(thing for thing in gc.get_objects() if isinstance(thing, Tensor))
    return [size for address, size in alive.items() if size > 400 and address not in _sizes(_kept(run))]


def _watch_bytes(run: Run) -> list[int]:
    """Return a list to which each collective appends the bytes then alive; waits for each, so that none lags behind."""
    runtime = find_runtime(run.model)
    issue, seen = runtime.transport._issue, list[int]()

    def watched(work: Any, axis: Any, lane: str, key: Any, keep: tuple[Tensor, ...]) -> Handle:
        tensors = [*_kept(run), *keep]
        for bucket in (bucket for unit in runtime.schedule.units for bucket in unit.buckets):
            parts = [bucket.gradient, *(parameter.grad for parameter in bucket.parameters)]
            tensors += [tensor for tensor in parts if tensor is not None]
        seen.append(sum(_sizes(tensors).values()))
        handle = issue(work, axis, lane, key, keep)
        handle.wait()
        return handle

    runtime.transport._issue = watched  # type: ignore[method-assign]
    return seen


def _padding_bytes(run: Run) -> int:
    """What the plan counts as state of a bucket's padding, which has none."""
    slots = {"muon": 1, "adamw": 2, "sharded_adamw": 2}
    total = 0
    for bucket in (bucket for unit in find_runtime(run.model).schedule.units for bucket in unit.buckets):
        if bucket.master is not None:
            own = sum(segment.stop - segment.start for segment in bucket.segments())
            total += (bucket.master.numel() - own) * slots[bucket.plan.route] * 4
    return total


def _memory(replicas: int, storage: str) -> None:
    policy: dict[str, object] = {"defaults": {"param_dtype": "bf16"}, "overrides": POLICY["overrides"]}
    run = dedicate(make(dtype=torch.float32), _setting(replicas, storage, policy=policy))
    planned = dmuon.get_plan(run.model).ranks[dist.get_rank()]
    seen = _watch_bytes(run)
    for step in range(2):
        plain_backward(run.model, step, dist.get_rank())
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert _bytes_kept(run) + _padding_bytes(run) == planned.resident_bytes
    assert not _unplanned(run), "no scratch stays"
    working, bound = max(seen) - planned.resident_bytes, planned.peak_bytes - planned.resident_bytes
    assert bound / 4 < working <= bound, "the two largest units are not alive at the same moment here"
    masters = [
        bucket.master is not None
        for unit in find_runtime(run.model).schedule.units
        for bucket in unit.buckets
        if not bucket.is_sharded
    ]
    counts: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(masters))
    assert sum(count or 0 for count in counts) == len(masters), "one rank holds the master of each owned bucket"


@pytest.mark.parametrize(("world_size", "replicas", "storage"), [*MODES, (2, 1, "sharded")])
def test_memory_is_what_the_plan_says(world_size: int, replicas: int, storage: str) -> None:
    """Masters and state on the owner alone, bfloat16 copies in its column, whole parameters where storage says so."""
    run_ranks(world_size, _memory, replicas, storage)


def _publication(replicas: int, storage: str) -> None:
    """Publishing in a narrower dtype is seen by all rows alike, the owner's included; owners keep full precision."""
    run = dedicate(make(dtype=torch.float32), _setting(replicas, storage, policy=FP32, publish_dtype="bf16"))
    for step in range(2):
        plain_backward(run.model, step, 0)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert_traffic(run, 2)
    with torch.no_grad():
        logits = run.model(batch(5, 5))
    others: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(others, logits)
    assert all(other is not None and torch.equal(other, logits) for other in others)
    state = dmuon.get_model_state_dict(run.model)["layers.0.up.weight"]
    assert not torch.equal(state, state.bfloat16().float())
    plan = dmuon.get_plan(run.model)
    assert any(bucket.publish_bytes == 2 * bucket.numel for bucket in plan.buckets)
    dmuon.set_model_state_dict(run.model, dmuon.get_model_state_dict(run.model))
    with torch.no_grad():
        assert torch.equal(logits, run.model(batch(5, 5))), "a loaded state is published as a trained one is"


@pytest.mark.parametrize(("world_size", "replicas", "storage"), MODES)
def test_publishing_dtype(world_size: int, replicas: int, storage: str) -> None:
    """A narrower dtype for publications halves their bytes and keeps replicas equal."""
    run_ranks(world_size, _publication, replicas, storage)


def _asynchronous(replicas: int, storage: str) -> None:
    """A publication is in flight when the step returns, and the unit that needs it waits; nothing else does."""
    run = dedicate(make(), _setting(replicas, storage))
    units = find_runtime(run.model).schedule.units
    plain_backward(run.model, 0, dist.get_rank())
    run.optimizer.step()
    pending = [bucket.publication.is_pending for unit in units for bucket in unit.buckets]
    expected = [
        not bucket.is_sharded and bucket.is_in_column if storage == "sharded" else True
        for unit in units
        for bucket in unit.buckets
    ]
    assert pending == expected
    lm_loss(run.model, batch(1, dist.get_rank()))
    assert not any(bucket.publication.is_pending for unit in units for bucket in unit.buckets)
    phases = [what.split("'")[3] for where, what in run.log if "publish" in what or "forward" in what]
    assert phases.index("publish") > 0 and phases[-1] == ("forward" if storage == "sharded" else "publish")
    run.optimizer.replicate_async = False
    plain_backward(run.model, 1, dist.get_rank())
    run.optimizer.step()
    assert not any(bucket.publication.is_pending for unit in units for bucket in unit.buckets)


def _held_up() -> None:
    """What compute waits for behind a publication or the first stage of a reduction is counted of these as well.

    Each wait for a gather that was issued behind one says so once, right before it; so does each second stage.
    """
    run = dedicate(make(), _setting(2, "sharded"))
    said: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("hold_up", "wait", "wait_aside"):
            call = getattr(Handle, name)

            def noted(handle: Handle, name: str = name, call: Any = call) -> None:
                if handle._work is not None or name == "hold_up":
                    said.append((name, handle._what.partition(" of ")[0]))
                call(handle)

            patch.setattr(Handle, name, noted)
        for step in range(2):
            plain_backward(run.model, step, dist.get_rank())
            run.optimizer.step()
            run.optimizer.zero_grad()
    aside = [what for name, what in said if name == "wait_aside"]
    assert set(aside) == {"publish", "reduce"}
    held_up = [(what, following) for (name, what), following in itertools.pairwise(said) if name == "hold_up"]
    assert sorted(what for what, _ in held_up) == sorted(aside)
    assert {what for what, _ in held_up if what == "publish"} and {following for _, following in held_up} <= {
        ("wait", "forward"), ("wait", "reduce"),
    }  # fmt: skip


def _behind(replicas: int, storage: str) -> None:
    _held_up()
    _asynchronous(replicas, storage)


@pytest.mark.parametrize(("world_size", "replicas", "storage"), [(4, 2, "sharded")])
def test_publications_run_behind_the_next_forward(world_size: int, replicas: int, storage: str) -> None:
    """Asynchronous publications are waited for by the next materialisation; synchronous ones by the step."""
    run_ranks(world_size, _behind, replicas, storage)
