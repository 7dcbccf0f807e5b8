"""What a step will take on chips whose figures are known: pure arithmetic on a plan, nothing is run.

A step is its compute, the communication that compute waits for, and the update. Compared is FSDP2 with AdamW on the
same mesh. Assumed: the same compute in both; units prefetched one ahead; nothing of the update hidden; publishing to
other replicas behind the next forward. Not modelled: activations, the slow rank of a real cluster, traffic of others.
``docs/scaling.md`` says what of it has been compared with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from dmuon_runtime._ns_groups import kept_bytes
from dmuon_runtime.chips import ChipFigures
from dmuon_runtime.matrices import MatrixShape, matrix_shapes
from dmuon_runtime.partition import ADAMW_BYTES_PER_ELEMENT, DEFAULT_NS_WORK, NsWork, ns_flops
from dmuon_runtime.plan import RuntimePlan, UnitPlan

__all__ = [
    "Axis", "Prediction", "StepWork", "collective_seconds", "mesh_axes", "ns_seconds", "predict_step",
    "split_ns_seconds",
]  # fmt: skip

Collective = Literal["broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"]
_BROADCAST: Collective = "broadcast"
_REDUCE: Collective = "reduce"
MUON_BYTES_PER_ELEMENT = 28.0
"""Of an update in one pass each side of Newton-Schulz: gradient read, momentum read and written, its look-ahead
written; result read, weight read and written, and its copy in the compute dtype."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one rank computes in a step."""

    tokens: int
    """Of one rank, over all its micro batches."""
    micro_batches: int = 1
    looked_up: frozenset[str] = frozenset()
    """Parameters that are no matrix product: embeddings. Tied ones count nevertheless."""
    score_flops_per_token: float = 0.0
    """Attention scores and their use in the forward, all layers together."""
    newton_schulz: NsWork = DEFAULT_NS_WORK


@dataclass(frozen=True)
class Axis:
    """A mesh axis as wires see it: ranks in a group of it, and how many of them share a node."""

    size: int
    per_node: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of the slowest rank, beside FSDP2 with AdamW on the same mesh. Seconds and bytes."""

    chip: str
    compute_s: float
    update_s: float
    """Newton-Schulz and all elementwise updates of the busiest rank."""
    ns_s: float
    """Newton-Schulz of the rank that has most of it."""
    ns_mean_s: float
    """Mean over ranks."""
    largest_matrix_s: float
    """Newton-Schulz of the largest matrix: no number of ranks brings :attr:`ns_s` below it."""
    forward_exposed_s: float
    backward_exposed_s: float
    """Materialising again, and reductions."""
    publish_exposed_s: float
    adamw_update_s: float
    adamw_exposed_s: float
    resident_bytes: int
    """On the fullest rank, between steps, with what captured Newton-Schulz graphs keep."""
    peak_bytes: int
    """The same at its worst moment, without activations."""
    adamw_resident_bytes: int

    @property
    def exposed_s(self) -> float:
        """Communication that compute waits for."""
        return self.forward_exposed_s + self.backward_exposed_s + self.publish_exposed_s

    @property
    def step_s(self) -> float:
        """A whole step."""
        return self.compute_s + self.exposed_s + self.update_s

    @property
    def adamw_step_s(self) -> float:
        """A whole step of FSDP2 with AdamW."""
        return self.compute_s + self.adamw_exposed_s + self.adamw_update_s

    @property
    def overhead_ratio(self) -> float:
        """What a step costs more than AdamW's, over AdamW's."""
        return self.step_s / self.adamw_step_s - 1.0

    def as_dict(self) -> dict[str, object]:
        """Return all of it, what is derived included."""
        derived = ("exposed_s", "step_s", "adamw_step_s", "overhead_ratio")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def ns_seconds(chip: ChipFigures, matrices: Iterable[MatrixShape], work: NsWork = DEFAULT_NS_WORK) -> float:
    """Return the time of one rank's Newton-Schulz: a group for each short side, one after the other.

    What goes on longer than the chip keeps its clocks takes longer from then on.
    """
    groups: dict[int, float] = {}
    for matrix in matrices:
        elements = matrix.count * matrix.rows * matrix.columns
        seconds = ns_flops(matrix, work) / chip.ns_flops_per_s + elements * chip.ns_element_s
        short = min(matrix.rows, matrix.columns)
        groups[short] = groups.get(short, chip.ns_group_s) + seconds
    return _sustained(chip, sum(groups.values()))


def _sustained(chip: ChipFigures, fresh: float) -> float:
    """Return what work of ``fresh`` seconds takes on a chip that lowers its clocks after a while."""
    return fresh + max(0.0, fresh - chip.ns_burst_s) * (chip.ns_sustained_ratio - 1.0)


def split_ns_seconds(chip: ChipFigures, matrix: MatrixShape, axis: Axis) -> float:
    """Return the time of one matrix whose long side is cut over an axis: each rank forms a part of X X^T.

    The products of the short side alone are done by every rank, and the Gram matrix, float32, is summed over the axis
    at the start and after each restart.
    """
    short, long = sorted((matrix.rows, matrix.columns))
    segments = 1 + DEFAULT_NS_WORK.num_restarts
    alone = ns_flops(matrix) - matrix.count * 3.0 * segments * long * short**2
    assert alone > 0, "that many steps have products of the short side alone"
    shared = (ns_flops(matrix) - alone) / axis.size
    elements = matrix.count * short * long / axis.size
    sums = segments * collective_seconds(chip, "all_reduce", 4 * matrix.count * short**2, axis)
    work = (alone + shared) / chip.ns_flops_per_s + elements * chip.ns_element_s
    return _sustained(chip, chip.ns_group_s + work) + sums


def mesh_axes(chip: ChipFigures, mesh_shape: tuple[int, int]) -> tuple[Axis, Axis]:
    """Return the replicate and shard axis of a mesh whose shard ranks are neighbours."""
    replicas, shards = mesh_shape
    across = max(1, chip.gpus_per_node // shards)
    return Axis(replicas, min(replicas, across)), Axis(shards, min(shards, chip.gpus_per_node))


def collective_seconds(chip: ChipFigures, kind: Collective, payload_bytes: float, axis: Axis) -> float:
    """Return the time of a collective as a pipelined ring (an all-reduce between nodes as a tree); 0 for one rank.

    Bytes through a GPU are the payload times (n - 1)/n for a gather or scatter, twice that for an all-reduce, and the
    payload for a broadcast or reduce. Between nodes all cards of the group's ranks in a node work at once.
    """
    n, nodes = axis.size, math.ceil(axis.size / axis.per_node)
    if n == 1 or payload_bytes == 0:
        return 0.0
    share = {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_reduce": 2 * (n - 1) / n}.get(kind, 1.0)
    rates = [chip.node_bytes_per_s] if axis.per_node > 1 else []
    rates += [axis.per_node * chip.network_bytes_per_s] if nodes > 1 else []
    hops = nodes - 1 if kind != "all_reduce" else 2 * math.ceil(math.log2(nodes))
    local = axis.per_node - 1 if kind == "all_reduce" else n - nodes
    wait = chip.collective_s + local * chip.node_hop_s + hops * chip.network_hop_s
    return wait + share * payload_bytes / min(rates)


@dataclass(frozen=True)
class _UnitTimes:
    """Seconds of one unit: compute of a micro batch, and communication of ours and of FSDP2 (or DDP)."""

    forward: float
    gather: float
    reduce: float
    publish: float
    plain_gather: float
    plain_reduce: float


def predict_step(plan: RuntimePlan, chip: ChipFigures, work: StepWork) -> Prediction:
    """Return what a step of ``plan`` takes on ``chip``; what FSDP2 or DDP keep is left out, as in a plan."""
    times, micro = _unit_times(plan, chip, work), work.micro_batches
    compute = [t.forward for t in times]
    forward, backward = _exposed([t.gather for t in times], compute), _exposed_backward(plan, times, micro)
    published = _exposed([t.gather + t.publish for t in times], compute) - forward
    plain = [replace(t, gather=t.plain_gather, reduce=t.plain_reduce) for t in times]
    plain_forward = _exposed([t.gather for t in plain], compute)
    matrices = _rank_matrices(plan)
    ns = [ns_seconds(chip, shapes, work.newton_schulz) for shapes in matrices]
    kept = [kept_bytes(tuple((shape.count, shape.rows, shape.columns) for shape in shapes)) for shapes in matrices]
    elements = sum(entry.elements for entry in plan.parameters)
    parts = 1 if plan.storage == "replicated" else plan.mesh_shape[1]
    return Prediction(
        chip=chip.name,
        compute_s=3 * sum(compute) * micro,
        update_s=max(a + b for a, b in zip(ns, _elementwise(plan, chip), strict=True)),
        ns_s=max(ns),
        ns_mean_s=sum(ns) / len(ns),
        largest_matrix_s=max((ns_seconds(chip, [shape], work.newton_schulz) for shape in _shapes(plan)), default=0.0),
        forward_exposed_s=forward * micro,
        backward_exposed_s=backward,
        publish_exposed_s=published,
        adamw_update_s=elements / parts * ADAMW_BYTES_PER_ELEMENT / chip.memory_bytes_per_s,
        adamw_exposed_s=plain_forward * micro + _exposed_backward(plan, plain, micro),
        resident_bytes=max(rank.resident_bytes + graphs for rank, graphs in zip(plan.ranks, kept, strict=True)),
        peak_bytes=max(rank.peak_bytes + graphs for rank, graphs in zip(plan.ranks, kept, strict=True)),
        adamw_resident_bytes=12 * elements // parts,
    )


def _exposed(comm: Sequence[float], compute: Sequence[float]) -> float:
    """Return what is waited for when the next unit's communication runs beside a unit's compute."""
    late = [max(0.0, after - beside) for after, beside in zip(comm[1:], compute, strict=False)]
    return (comm[0] if comm else 0.0) + sum(late)


def _exposed_backward(plan: RuntimePlan, times: Sequence[_UnitTimes], micro_batches: int) -> float:
    """As :func:`_exposed`, for all micro batches; in the last one reductions follow their unit, beside the next gather
    and the compute between."""
    order = [times[index] for index in plan.backward_order]
    again = plan.reshard_after_forward and plan.storage != "replicated"
    gathers, compute = [t.gather * again for t in order], [2 * t.forward for t in order]
    after, before = [*gathers[1:], 0.0], [0.0, *(t.reduce for t in order[:-1])]
    late = [max(0.0, a + b - c) for a, b, c in zip(after, before, compute, strict=True)]
    last = gathers[0] + sum(late) + order[-1].reduce
    return last + (micro_batches - 1) * _exposed(gathers, compute)


def _unit_times(plan: RuntimePlan, chip: ChipFigures, work: StepWork) -> list[_UnitTimes]:
    """Return the times of all units, in order of the forward."""
    products = [_product_elements(plan, unit, work) for unit in plan.units]
    scores = work.score_flops_per_token / max(1, sum(products))
    tokens = work.tokens / work.micro_batches
    return [
        _UnitTimes(
            tokens * number * (2.0 + scores) / chip.train_flops_per_s,
            *_our_communication(plan, unit, chip),
            *_plain_communication(plan, unit, chip),
        )
        for unit, number in zip(plan.units, products, strict=True)
    ]


def _our_communication(plan: RuntimePlan, unit: UnitPlan, chip: ChipFigures) -> tuple[float, float, float]:
    """Return the seconds of gathering, reducing and publishing; beyond the row those of the busiest column."""
    replicate, shard = mesh_axes(chip, plan.mesh_shape)
    gather = reduce = 0.0
    second: dict[int, float] = {}
    publish: dict[int, float] = {}
    for bucket in unit.buckets:
        owned = bucket.owner is not None
        gather += collective_seconds(chip, "broadcast" if owned else "all_gather", bucket.gather_bytes, shard)
        reduce += collective_seconds(chip, "reduce" if owned else "reduce_scatter", bucket.reduce_bytes, shard)
        if bucket.owner is None:
            reduce += collective_seconds(chip, "all_reduce", bucket.reduce_bytes / shard.size, replicate)
            continue
        column = plan.place(bucket.owner)[0]
        for sums, kind, size in ((second, _REDUCE, bucket.reduce_bytes), (publish, _BROADCAST, bucket.publish_bytes)):
            sums[column] = sums.get(column, 0.0) + collective_seconds(chip, kind, size, replicate)
    busiest, published = max(second.values(), default=0.0), max(publish.values(), default=0.0)
    return (0.0, reduce, gather) if plan.storage == "replicated" else (gather, reduce + busiest, published)


def _plain_communication(plan: RuntimePlan, unit: UnitPlan, chip: ChipFigures) -> tuple[float, float]:
    """Return the seconds of gathering and reducing of FSDP2, or of DDP where storage is replicated."""
    replicate, shard = mesh_axes(chip, plan.mesh_shape)
    weights = sum(bucket.gather_bytes for bucket in unit.buckets)
    gradients = sum(bucket.reduce_bytes for bucket in unit.buckets)
    if plan.storage == "replicated":
        return 0.0, collective_seconds(chip, "all_reduce", gradients, shard)
    reduce = collective_seconds(chip, "reduce_scatter", gradients, shard)
    reduce += collective_seconds(chip, "all_reduce", gradients / shard.size, replicate)
    return collective_seconds(chip, "all_gather", weights, shard), reduce


def _product_elements(plan: RuntimePlan, unit: UnitPlan, work: StepWork) -> int:
    """Return the elements of a unit that each token is multiplied with."""
    entries = [plan.parameters[index] for index in unit.parameters]
    return sum(e.elements for e in entries if len(e.shape) > 1 and (e.name not in work.looked_up or e.aliases))


def _shapes(plan: RuntimePlan) -> set[MatrixShape]:
    """Return the different matrices of a plan, one of each."""
    return {replace(shape, count=1) for shapes in _rank_matrices(plan) for shape in shapes}


def _rank_matrices(plan: RuntimePlan) -> list[list[MatrixShape]]:
    found: list[list[MatrixShape]] = [[] for _ in range(plan.world_size)]
    for entry in plan.parameters:
        if entry.route == "muon" and entry.owner is not None:
            found[entry.owner] += matrix_shapes(entry.shape, entry.matrix_view, entry.split_rows)
    return found


def _elementwise(plan: RuntimePlan, chip: ChipFigures) -> list[float]:
    """Return the seconds of elementwise updates of every rank."""
    per_rank, shared = [0.0] * plan.world_size, 0.0
    for entry in plan.parameters:
        size = MUON_BYTES_PER_ELEMENT if entry.route == "muon" else ADAMW_BYTES_PER_ELEMENT
        seconds = entry.elements * size / chip.memory_bytes_per_s
        if entry.owner is None:
            shared += seconds / plan.mesh_shape[1]
        else:
            per_rank[entry.owner] += seconds
    return [seconds + shared for seconds in per_rank]
