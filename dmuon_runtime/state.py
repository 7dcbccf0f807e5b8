"""Model state by fully qualified name, whole tensors: buffers and every name of a tied tensor included."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dmuon_runtime.buckets import Bucket
from dmuon_runtime.errors import StateMismatch
from dmuon_runtime.policy import DTYPE_NAMES
from dmuon_runtime.runtime import Runtime, find_runtime
from dmuon_runtime.schedule import Call

__all__ = ["get_model_state_dict", "set_model_state_dict"]


@torch.no_grad()
def get_model_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and persistent buffers, keys and order of ``model.state_dict()``; collective.

    Managed parameters come from the masters, in master dtype; names of one tied tensor share one copy.
    """
    runtime = find_runtime(model)
    runtime.watch.note_outside()
    runtime.schedule.meet(Call.SAVE)
    whole: dict[int, Tensor] = {}
    for unit in runtime.schedule.units:
        for bucket in unit.buckets:
            for parameter, tensor in zip(bucket.parameters, _gather_master(bucket, runtime), strict=True):
                whole[id(parameter)] = tensor
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found[name] = whole[id(value)] if id(value) in whole else value.detach().clone()
    return found


def _gather_master(bucket: Bucket, runtime: Runtime) -> list[Tensor]:
    dtype = DTYPE_NAMES[bucket.plan.master_dtype]
    flat = torch.empty(bucket.plan.numel, dtype=dtype, device=runtime.transport.device)
    if bucket.master is not None and not bucket.is_sharded:
        flat.copy_(bucket.master)
    runtime.transport.gather_tensor(bucket.plan.owner, flat, bucket.master if bucket.is_sharded else None)
    return [view.clone() for view in bucket.views(flat)]


@torch.no_grad()
def set_model_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors by name; collective, with the same ``state`` on every rank.

    Raises :class:`StateMismatch` on all ranks, before anything is changed, with everything that is missing, unexpected,
    of another shape, or different under two names of one tensor.
    """
    runtime = find_runtime(model)
    runtime.watch.note_outside()
    runtime.schedule.meet(Call.LOAD)
    targets = model.state_dict(keep_vars=True)
    mistakes = _mistakes(targets, state)
    everywhere = [json.loads(text) for text in runtime.transport.gather_texts(json.dumps(mistakes))]
    if any(everywhere):
        lines = [f"rank {rank}: {line}" for rank, found in enumerate(everywhere) for line in found]
        raise StateMismatch("the state does not fit, nothing was loaded: " + "; ".join(lines), lines)
    managed = {id(parameter) for parameter in runtime.parameters}
    by_id = {id(value): state[name] for name, value in targets.items()}
    for target in targets.values():
        if id(target) not in managed:
            target.detach().copy_(by_id[id(target)])
    for unit in runtime.schedule.units:
        for bucket in unit.buckets:
            _load_master(bucket, [by_id[id(parameter)] for parameter in bucket.parameters], runtime)
    runtime.schedule.end_step()


def _load_master(bucket: Bucket, values: list[Tensor], runtime: Runtime) -> None:
    if bucket.master is None:
        return
    flat = torch.zeros(bucket.plan.numel, dtype=bucket.master.dtype, device=runtime.transport.device)
    for view, value in zip(bucket.views(flat), values, strict=True):
        view.copy_(value)
    bucket.master.copy_(bucket.shard_of(flat) if bucket.is_sharded else flat)


def _mistakes(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    found = [f"missing {name}" for name in targets if name not in state]
    found += [f"unexpected {name}" for name in state if name not in targets]
    first: dict[int, str] = {}
    for name, target in targets.items():
        if name not in state:
            continue
        if tuple(state[name].shape) != tuple(target.shape):
            found.append(f"{name} has shape {tuple(state[name].shape)}, the model {tuple(target.shape)}")
            continue
        earlier = first.setdefault(id(target), name)
        if earlier != name and not torch.equal(state[earlier], state[name]):
            found.append(f"{earlier} and {name} are one tensor in the model, but differ")
    return found
