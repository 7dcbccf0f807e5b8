"""The mesh as the transport sees it: two axes, their process groups, and groups that are used again.

Note "Groups that are used again": torch keeps a process group until it is destroyed, so a job that builds and drops
many models must not make new groups for each. What a collected model leaves behind is kept by *value*: the global
ranks, the backend, and how many collectives each group has seen. Ranks collect at different times; what is taken up
again is therefore agreed on: the lowest set that is idle on every rank, and with the same counts, which means that no
rank has issued what another has not. When the default group is destroyed, all that was kept goes with it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon_runtime.errors import MeshError

__all__ = ["Axis", "Grid", "num_idle_sets", "open_grid"]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: its size, this rank's place on it, and a group for each lane (None when alone)."""

    name: str
    rank: int
    size: int
    weights: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None


@dataclass(frozen=True)
class Grid:
    """Both axes, and the group over all ranks for control; collected with the model, which frees its groups."""

    shard: Axis
    replicate: Axis
    ranks: tuple[int, ...]
    """Global ranks, row by row."""
    device: torch.device
    control: dist.ProcessGroup
    isolated: bool


@dataclass
class _GroupSet:
    """The groups of one grid in a fixed order: control, then the lanes of each axis."""

    serial: int
    groups: tuple[dist.ProcessGroup | None, ...]

    def counts(self) -> list[int]:
        """Return how many collectives each group has seen."""
        return [0 if group is None else _num_collectives(group) for group in self.groups]


_Key = tuple[tuple[int, ...], tuple[int, int], str, bool]


@dataclass
class _Pool:
    """Idle sets of the default group that is alive."""

    world: weakref.ref[dist.ProcessGroup] | None = None
    idle: dict[_Key, list[_GroupSet]] = field(default_factory=dict)
    made: dict[_Key, int] = field(default_factory=dict)

    def settle(self) -> None:
        """Forget everything when the default group is another one than before."""
        world = dist.group.WORLD
        assert world is not None, "dedicate_params needs an initialised process group"
        if self.world is None or self.world() is not world:
            self.world = weakref.ref(world)
            self.idle.clear()
            self.made.clear()


_POOL = _Pool()


def num_idle_sets() -> int:
    """Return how many sets of groups wait to be used again."""
    _POOL.settle()
    return sum(len(sets) for sets in _POOL.idle.values())


def open_grid(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None, policy: str) -> Grid:
    """Return the grid of ``mesh`` (shard) and ``replicate_mesh``; collective over all ranks of both.

    Raises :class:`MeshError` when a mesh is not 1-D, lacks this rank, or the two are no grid.
    """
    _check_mesh("shard", mesh)
    row = dist.get_process_group_ranks(mesh.get_group())
    rows, row_index = [row], 0
    if replicate_mesh is not None:
        _check_mesh("replicate", replicate_mesh)
        rows, row_index = _collect_rows(row, mesh.get_local_rank(), replicate_mesh), replicate_mesh.get_local_rank()
    columns = list(zip(*rows, strict=True))
    shape = (len(rows), len(row))
    ranks = tuple(itertools.chain.from_iterable(rows))
    isolated = policy == "isolated"
    backend = dist.get_backend(mesh.get_group())
    column = list(columns[mesh.get_local_rank()])
    shared = (mesh.get_group(), replicate_mesh.get_group() if replicate_mesh is not None else None)

    def make() -> tuple[dist.ProcessGroup | None, ...]:
        lanes = [(row, backend), (row, backend), (column, backend), (column, backend)] if isolated else []
        return (_new_group(list(ranks), "gloo"), *(_new_group(*lane) if len(lane[0]) > 1 else None for lane in lanes))

    taken = _take((ranks, shape, backend, isolated), make, (mesh, replicate_mesh))
    control, *lanes = taken.groups
    assert control is not None
    lanes = lanes or [shared[0], shared[0], shared[1], shared[1]]
    cuda = mesh.device_type == "cuda"
    grid = Grid(
        Axis("shard", mesh.get_local_rank(), len(row), lanes[0], lanes[1]),
        Axis("replicate", row_index, len(rows), lanes[2], lanes[3]),
        ranks,
        torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        control,
        isolated,
    )
    weakref.finalize(grid, _give_back, (ranks, shape, backend, isolated), taken, _POOL.world).atexit = False
    return grid


def _check_mesh(role: str, mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"the {role} mesh must be a DeviceMesh of 1 axis, not {type(mesh).__name__}; make one with "
            "init_device_mesh(device, (num_ranks,))"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        raise MeshError(
            f"the {role} mesh must have 1 axis, not {mesh.ndim} ({names}); pass the {role} axis"
            + (f', such as mesh["{names[-1 if role == "shard" else 0]}"]' if names else "")
            + (", and the other as replicate_mesh" if role == "shard" else "")
        )
    if mesh.get_coordinate() is None:
        raise MeshError(f"global rank {dist.get_rank()} is not on the {role} mesh; call dedicate_params on its ranks")


def _collect_rows(row: list[int], shard_rank: int, replicate_mesh: DeviceMesh) -> list[list[int]]:
    """Return the global ranks of every row, and hold them to be a grid with this rank's column."""
    column = dist.get_process_group_ranks(replicate_mesh.get_group())
    found: list[list[int] | None] = [None] * len(column)
    dist.all_gather_object(found, row, group=replicate_mesh.get_group())
    rows = [item or [] for item in found]
    everyone = list(itertools.chain.from_iterable(rows))
    is_grid = len({len(item) for item in rows}) == 1 and len(set(everyone)) == len(everyone)
    if not is_grid or [item[shard_rank] for item in rows] != column:
        raise MeshError(
            f"the shard rows {rows} and the replicate ranks {column} are no grid; slice both from one 2-D mesh: "
            'mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard")), then '
            'mesh["shard"] and replicate_mesh=mesh["replicate"]'
        )
    return rows


def _take(
    key: _Key, make: Callable[[], tuple[dist.ProcessGroup | None, ...]], meshes: Sequence[DeviceMesh | None]
) -> _GroupSet:
    """Return the lowest set that is idle on every rank with the same counts, or a new one."""
    _POOL.settle()
    idle = _POOL.idle.setdefault(key, [])
    offers = {entry.serial: entry.counts() for entry in idle}
    for mesh, lanes in zip(meshes, (slice(1, 3), slice(3, 5)), strict=True):
        if mesh is not None and mesh.size() > 1:
            offers = _common(offers, mesh, lanes)
    if offers:
        chosen = min(offers)
        entry = next(item for item in idle if item.serial == chosen)
        idle.remove(entry)
        return entry
    _POOL.made[key] = _POOL.made.get(key, 0) + 1
    return _GroupSet(_POOL.made[key], make())


def _common(offers: dict[int, list[int]], mesh: DeviceMesh, lanes: slice) -> dict[int, list[int]]:
    """Keep what every rank of ``mesh`` offers, with equal counts of control and of the axis's ``lanes``."""
    mine = {serial: [counts[0], *counts[lanes]] for serial, counts in offers.items()}
    everywhere: list[dict[int, list[int]] | None] = [None] * mesh.size()
    dist.all_gather_object(everywhere, mine, group=mesh.get_group())
    return {
        serial: counts
        for serial, counts in offers.items()
        if all(other is not None and other.get(serial) == mine[serial] for other in everywhere)
    }


def _give_back(key: _Key, entry: _GroupSet, world: object) -> None:
    if _POOL.world is world:
        _POOL.idle.setdefault(key, []).append(entry)


def _num_collectives(group: dist.ProcessGroup) -> int:
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _new_group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    options = None
    if "nccl" in backend:  # else a collective waits behind all blocks of the compute kernels that began before it
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return cast(
        dist.ProcessGroup,
        dist.new_group(ranks, backend=backend, pg_options=options, use_local_synchronization=True),
    )
