"""What of the training state a rank holds, part by part: the basis of saving and loading in parallel, on any mesh.

A part is a range of elements of one tensor, flattened in row-major order, which has a name and a kind: ``weight`` for
parameters and buffers, else the optimizer's word (``momentum_buffer``, ``exp_avg``, ``exp_avg_sq``, ``step``). Over all
ranks the parts with :attr:`StatePart.is_source` hold every element of every tensor exactly once; the others are copies
that must be loaded too. Owner and mesh are not mentioned, so what one mesh wrote any other can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dmuon_runtime.buckets import Bucket
from dmuon_runtime.errors import StateMismatch, UnsupportedFeature
from dmuon_runtime.guests import Guest, local_part
from dmuon_runtime.muon import Muon
from dmuon_runtime.policy import DTYPE_NAMES
from dmuon_runtime.runtime import Runtime, find_runtime, inner_model
from dmuon_runtime.schedule import Call

__all__ = ["WEIGHT", "StatePart", "StateTensor", "load_state_parts", "state_layout", "state_parts", "tensor_offset"]

WEIGHT = "weight"
"""The kind of parameters and buffers."""
_KINDS = {"muon": ("momentum_buffer",), "adamw": ("step", "exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class StatePart:
    """Elements [start, stop) of one flattened tensor of the state, as this rank holds them."""

    kind: str
    names: tuple[str, ...]
    """All names of the tensor; more than one when it is tied."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    tensor: Tensor
    """What this rank holds, in any shape; row-major, its elements are [start, stop) of the whole."""
    is_source: bool
    """True on exactly one rank for each element: that rank saves it."""
    through: torch.dtype | None = None
    """Loaded values take this dtype on their way, as they do when they are published."""

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]

    @property
    def stop(self) -> int:
        """End of the range."""
        return self.start + self.tensor.numel()

    def values(self) -> Tensor:
        """Return the elements, [stop - start]; not necessarily a copy."""
        return self.tensor.detach().reshape(-1)

    def load(self, values: Tensor) -> None:
        """Take ``values`` [stop - start] over."""
        values = values if self.through is None else values.to(self.through)
        self.tensor.detach().copy_(values.view(self.tensor.shape))


@dataclass(frozen=True)
class StateTensor:
    """One whole tensor of the state, wherever its parts are."""

    kind: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the parts that are saved."""


def state_layout(model: nn.Module, optimizer: Muon | None = None) -> list[StateTensor]:
    """Return every tensor of the state of all ranks, in an order that all ranks share; no communication."""
    runtime, names = find_runtime(model), _names(model)
    plans = {id(p): entry for entry, p in zip(runtime.plan.parameters, runtime.parameters, strict=True)}
    found: list[StateTensor] = []
    seen: set[int] = set()
    for value in inner_model(model).state_dict(keep_vars=True).values():
        if id(value) not in seen:
            seen.add(id(value))
            dtype = DTYPE_NAMES[plans[id(value)].master_dtype] if id(value) in plans else value.dtype
            found.append(StateTensor(WEIGHT, names[id(value)], tuple(value.shape), dtype))
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            for kind in _KINDS["muon" if group["route"] == "muon" else "adamw"]:
                shape = () if kind == "step" else tuple(parameter.shape)
                plan = plans.get(id(parameter))
                dtype = parameter.dtype if plan is None else DTYPE_NAMES[plan.optim_dtype]
                dtype = torch.float32 if kind == "step" else dtype
                found.append(StateTensor(kind, names[id(parameter)], shape, dtype))
    return found


def state_parts(model: nn.Module, optimizer: Muon | None = None) -> list[StatePart]:
    """Return what this rank holds of model and optimizer, in the model's order; no communication.

    Parts share memory with the state: copy them between two steps. Every rank's buffers are loaded from those of the
    first rank. Raises :class:`UnsupportedFeature` for a tensor that is sharded along another dim than its first.
    """
    runtime = find_runtime(model)
    parts = [*_model_parts(model, runtime)]
    if optimizer is not None:
        parts += _optimizer_parts(optimizer, _names(model))
    return parts


@torch.no_grad()
def load_state_parts(model: nn.Module, optimizer: Muon | None, read: Callable[[StatePart], Tensor | None]) -> None:
    """Load every part of this rank; collective.

    ``read`` returns the part's values [stop - start], or None to leave it as it is. It is called for all parts before
    anything changes; when it raises on some rank, all raise :class:`StateMismatch` and nothing has changed.
    """
    runtime = find_runtime(model)
    runtime.watch.note_outside()
    runtime.schedule.meet(Call.LOAD)
    runtime.schedule.wait_published()
    parts = state_parts(model, optimizer)
    values: list[Tensor | None] = []
    failure = ""
    try:
        values = [_checked(part, read(part)) for part in parts]
    except Exception as error:  # the other ranks must hear of it before they change anything
        failure = f"{type(error).__name__}: {error}"
    texts = runtime.transport.gather_texts(failure)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        raise StateMismatch("the state cannot be read, nothing was loaded: " + "; ".join(failed), failed)
    for part, found in zip(parts, values, strict=True):
        if found is not None:
            part.load(found)
    runtime.schedule.end_step()


def _checked(part: StatePart, values: Tensor | None) -> Tensor | None:
    if values is not None and values.numel() != part.tensor.numel():
        raise ValueError(f"{part.name} {part.kind}: {values.numel()} values for elements [{part.start}, {part.stop})")
    return values


def _names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return all names by the id of a tensor that the model's state dict has."""
    names: dict[int, tuple[str, ...]] = {}
    for name, value in inner_model(model).state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise UnsupportedFeature(
                f"{name} in the model's state dict is a {type(value).__name__}, and checkpoints hold tensors alone; "
                "keep it in a registered buffer",
                [name],
            )
        names[id(value)] = (*names.get(id(value), ()), name)
    return names


def _model_parts(model: nn.Module, runtime: Runtime) -> Iterator[StatePart]:
    names = _names(model)
    places = {
        id(parameter): (bucket, position)
        for unit in runtime.schedule.units
        for bucket in unit.buckets
        for position, parameter in enumerate(bucket.parameters)
    }
    seen: set[int] = set()
    for index, value in enumerate(inner_model(model).state_dict(keep_vars=True).values()):
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in places:
            yield from _bucket_parts(*places[id(value)], names[id(value)])
        else:
            yield _loose_part(value, names[id(value)], index, runtime)


def _bucket_parts(bucket: Bucket, position: int, names: tuple[str, ...]) -> Iterator[StatePart]:
    """Yield the master of a parameter, and the copies that are made of it, where this rank has them."""
    shape = tuple(bucket.parameters[position].shape)
    index = bucket.plan.parameters[position]
    for segment in bucket.segments():
        if segment.parameter_index == index:
            assert bucket.master is not None
            piece = bucket.master[segment.start : segment.stop]
            yield StatePart(WEIGHT, names, shape, segment.parameter_start, piece, bucket.counts_here)
    published = DTYPE_NAMES[bucket.plan.publish_dtype]
    if bucket.copy is not None:
        yield StatePart(WEIGHT, names, shape, 0, bucket.views(bucket.copy)[position], False, published)
    if bucket.is_resident:
        yield StatePart(WEIGHT, names, shape, 0, bucket.views(bucket.flat)[position], False, published)


def _loose_part(value: Tensor, names: tuple[str, ...], index: int, runtime: Runtime) -> StatePart:
    """Return what is no parameter of the runtime: a buffer, a frozen parameter, or one of FSDP2 or DDP."""
    if isinstance(value, DTensor):
        start, counts = tensor_offset(value, names[0])
        return StatePart(WEIGHT, names, tuple(value.shape), start, value.to_local(), counts)
    writer = index % runtime.transport.world_size if isinstance(value, nn.Parameter) else 0
    return StatePart(WEIGHT, names, tuple(value.shape), 0, value, runtime.transport.rank == writer)


def tensor_offset(tensor: DTensor, name: str) -> tuple[int, bool]:
    """Return at which element this rank's part of a DTensor begins, and whether this rank is its first replica.

    Raises :class:`UnsupportedFeature` when it is sharded along another dim than the first, or over several axes.
    """
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank is on the mesh"
    sharded = [kind for kind in tensor.placements if not kind.is_replicate()]
    if len(sharded) > 1 or not all(kind.is_shard(0) for kind in sharded):
        raise UnsupportedFeature(
            f"{name} is laid out as {tensor.placements}; a checkpoint takes tensors that are sharded along dim 0 over "
            "one mesh axis",
            [name],
        )
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    first = all(place[axis] == 0 for axis, kind in enumerate(tensor.placements) if kind.is_replicate())
    return (offset[0] * row if offset else 0), first


def _optimizer_parts(optimizer: Muon, names: Mapping[int, tuple[str, ...]]) -> Iterator[StatePart]:
    for piece in optimizer.pieces:
        start, shape = piece.segment.parameter_start, piece.plan.shape
        for kind, tensor in optimizer.state[piece.parameter].items():
            mine = names[id(piece.parameter)]
            if kind == "step":  # every rank with a part of the parameter counts the same
                yield StatePart(kind, mine, (), 0, tensor, piece.counts_here and start == 0)
            else:
                yield StatePart(kind, mine, shape, start, tensor, piece.counts_here)
    for guest in optimizer.guests:
        yield from _guest_parts(guest, optimizer.state[guest.parameter], names[id(guest.parameter)])


def _guest_parts(guest: Guest, state: Mapping[str, Tensor], names: tuple[str, ...]) -> Iterator[StatePart]:
    whole, start = guest.parameter, 0
    if isinstance(whole, DTensor):
        start, _ = tensor_offset(whole, guest.name)
    for kind, tensor in state.items():
        if kind == "step":
            source = guest.counts_here and start == 0 and guest.master.numel() > 0
            yield StatePart(kind, names, (), 0, tensor, source)
        else:
            yield StatePart(kind, names, tuple(whole.shape), start, local_part(tensor), guest.counts_here)
