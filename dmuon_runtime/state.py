"""Model state by fully qualified name, whole tensors: buffers and every name of a tied tensor included."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon_runtime.buckets import Bucket
from dmuon_runtime.errors import StateMismatch
from dmuon_runtime.policy import DTYPE_NAMES
from dmuon_runtime.runtime import Runtime, find_runtime, inner_model
from dmuon_runtime.schedule import Call

__all__ = ["get_model_state_dict", "set_model_state_dict"]


@torch.no_grad()
def get_model_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and persistent buffers, keys and order of ``model.state_dict()``; collective.

    Managed parameters come from the masters, in master dtype; those of FSDP2 are gathered; names of one tied tensor
    share one copy.
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
    for name, value in inner_model(model).state_dict(keep_vars=True).items():
        found[name] = whole[id(value)] if id(value) in whole else _whole(value.detach())
    return found


def _whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, or all of a DTensor (FSDP2's); the latter is collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _laid_out(value: Tensor, target: Tensor) -> Tensor:
    """Return a whole ``value`` as ``target`` is laid out, without communication."""
    if not isinstance(target, DTensor):
        return value
    value = value.to(device=target.device, dtype=target.dtype)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def _gather_master(bucket: Bucket, runtime: Runtime) -> list[Tensor]:
    """Bring a bucket's master to all ranks: along the replicate axis to the owner's column, then along each row."""
    transport = runtime.transport
    dtype = DTYPE_NAMES[bucket.plan.master_dtype]
    flat = torch.empty(bucket.plan.numel, dtype=dtype, device=transport.device)
    if bucket.is_sharded:
        assert bucket.master is not None
        transport.all_gather(transport.shard, flat, bucket.master, None).wait()
    else:
        if bucket.master is not None:
            flat.copy_(bucket.master)
        if bucket.is_in_column:
            transport.broadcast(transport.replicate, flat, bucket.owner_place[1], None).wait()
        transport.broadcast(transport.shard, flat, bucket.owner_place[0], None).wait()
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
    targets = inner_model(model).state_dict(keep_vars=True)
    mistakes = _mistakes(targets, state)
    everywhere = [json.loads(text) for text in runtime.transport.gather_texts(json.dumps(mistakes))]
    if any(everywhere):
        lines = [f"rank {rank}: {line}" for rank, found in enumerate(everywhere) for line in found]
        raise StateMismatch("the state does not fit, nothing was loaded: " + "; ".join(lines), lines)
    managed = {id(parameter) for parameter in runtime.parameters}
    by_id = {id(value): state[name] for name, value in targets.items()}
    for target in targets.values():
        if id(target) not in managed:
            target.detach().copy_(_laid_out(by_id[id(target)], target))
    for unit in runtime.schedule.units:
        for bucket in unit.buckets:
            bucket.load([by_id[id(parameter)] for parameter in bucket.parameters])
    runtime.schedule.end_step()


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
