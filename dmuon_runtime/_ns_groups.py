"""What goes through one sequence of launches: matrices grouped, stacked, iterated and cut apart again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from dmuon_runtime._cpu_precision import iterates_in_bfloat16
from dmuon_runtime._elementwise import normalize_into
from dmuon_runtime._last_product import last_product
from dmuon_runtime._ns_choices import Form
from dmuon_runtime._ns_graphs import Unfinished
from dmuon_runtime._ns_iterations import Long, decide_algorithm, direct_iteration, gram_iteration, ns_flops
from dmuon_runtime.coefficients import Triple
from dmuon_runtime.kernels import KERNELS
from dmuon_runtime.kernels._tiles import matrices_that_fill

__all__ = [
    "Group", "Recipe", "by_shape", "compute_dtype", "decide_form", "empty_stack", "fill", "finish", "is_open",
    "kept_bytes", "num_matrices_of", "rounds", "stack_shapes",
]  # fmt: skip


MIN_OPEN_DIM: Final = 128
"""Smaller matrices take microseconds in either form."""
CLOSE: Final = 0.75
"""Ratio of FLOPs down to which the form that costs more of them may still be faster."""
BFLOAT16: Final = "bfloat16"
FLOAT16: Final = "float16"


@dataclass(frozen=True, slots=True)
class Group:
    """Matrices that go through one sequence of launches: everything that could change that work."""

    device: torch.device
    dtype: torch.dtype
    short_dim: int
    long_dim: int
    """0 where matrices of different long sides share the group."""
    kernel: str
    algorithm: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """The polynomial: coefficients and restarts."""

    coefficients: tuple[Triple, ...]
    restarts: tuple[int, ...]

    def run(self, group: Group, stacks: Sequence[Tensor], choices: Mapping[str, str] | None = None) -> Unfinished:
        """Iterate on normalised stacks [b, rows, cols], with the tiles that ``choices`` name."""
        kernel = KERNELS[group.kernel].tuned(choices or {})
        if group.algorithm == "gram":
            return gram_iteration(stacks, self.coefficients, self.restarts, kernel)
        return direct_iteration(stacks, self.coefficients, kernel)


def is_open(form: Form) -> bool:
    """True where FLOPs alone do not say which form is faster: nearly square, and large enough to matter."""
    if form.dtype == BFLOAT16:
        return False
    gram, direct = (_flops(form, name) for name in ("gram", "direct"))
    return form.short_dim >= MIN_OPEN_DIM and CLOSE <= gram / direct <= 1 / CLOSE


def decide_form(form: Form, choices: Mapping[str, str]) -> str:
    """Return ``gram`` or ``direct``: what was measured where that is a question, else what costs fewer FLOPs.

    In bfloat16 it is ``direct`` alone: the Gram form takes 0.8 of the time at an aspect ratio of 4, but has 8 times the
    error on Gaussian matrices, and leaves all bounds where singular values decay (``benchmarks/ns_accuracy.py``). Of
    small matrices in float16 the Gram form loses dominant directions (0.2 at a side of 4), and gains no time.
    """
    if form.dtype == BFLOAT16 or (form.dtype == FLOAT16 and form.short_dim < MIN_OPEN_DIM):
        return "direct"
    chosen = choices.get(form.key) if is_open(form) else None
    if chosen in ("gram", "direct"):
        return chosen
    share = KERNELS[form.kernel].product_share
    return decide_algorithm(form.short_dim, form.long_dim, form.num_steps, form.num_restarts, share)


def _flops(form: Form, algorithm: str) -> float:
    share = KERNELS[form.kernel].product_share
    return ns_flops(algorithm, form.short_dim, form.long_dim, form.num_steps, form.num_restarts, share)


def num_matrices_of(shape: Sequence[int]) -> int:
    """Matrices in a tensor of ``shape`` [..., m, n]."""
    return math.prod(shape[:-2])


def by_shape(shapes: Sequence[Sequence[int]]) -> dict[tuple[int, int], list[int]]:
    """Return the indices of ``shapes`` by their last two dims, in order of appearance."""
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        members[shape[-2], shape[-1]].append(index)
    return members


def stack_shapes(shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the stack [b, m, n] of each size among ``shapes``, in order of appearance."""
    return tuple(
        (sum(num_matrices_of(shapes[index]) for index in same), *size) for size, same in by_shape(shapes).items()
    )


def rounds(group: Group, members: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Cut a group on a GPU into rounds of no more matrices than it takes to fill the device (or nearly twice as many).

    More at once would be slower and need more memory. Sizes that have enough matrices get rounds of their own, as equal
    as can be, so that few graphs serve all of them; the others share rounds.

    Args:
        members: indices of the group's tensors in ``shapes``; a tensor is never cut.
        shapes: [..., m, n] of each tensor of the call.
    """
    full = matrices_that_fill(group.short_dim)
    counts = [num_matrices_of(shapes[index]) for index in members]
    if group.device.type != "cuda" or sum(counts) < 2 * full:
        return [list(members)]
    found: list[list[int]] = []
    rest: list[int] = []
    for same in by_shape([shapes[index] for index in members]).values():
        if sum(counts[place] for place in same) >= full:
            found.extend(_even(same, counts, full))
        else:
            rest.extend(same)
    found.extend(_even(rest, counts, full))
    return [[members[place] for place in part] for part in found]


@lru_cache(maxsize=4096)
def kept_bytes(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return what captured graphs keep between the steps of a rank that owns tensors of ``shapes`` [..., m, n].

    The inputs of the largest round once, for all of them, and the last X and Q of each different round, in 16 bits.
    """
    by_side: defaultdict[int, list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        by_side[min(shape[-2:])].append(index)
    inputs, outputs = 0, 0
    for side, members in by_side.items():
        group = Group(torch.device("cuda", 0), torch.float16, side, 0, "", "gram")
        cut = rounds(group, members, shapes)
        for stacks in {stack_shapes([shapes[index] for index in part]) for part in cut}:
            elements = sum(math.prod(stack) for stack in stacks)
            inputs = max(inputs, elements)
            outputs += elements + sum(stack[0] for stack in stacks) * side**2
    return 2 * (inputs + outputs)


def _even(places: Sequence[int], counts: Sequence[int], full: int) -> list[list[int]]:
    """Cut ``places``, in order, into parts that hold about equally many matrices, ``full`` or more each."""
    total = sum(counts[place] for place in places)
    size = total / max(1, total // full)
    parts: list[list[int]] = [[]] if places else []
    done = 0
    for place in places:
        if done >= len(parts) * size:
            parts.append([])
        parts[-1].append(place)
        done += counts[place]
    return parts


def empty_stack(shape: tuple[int, int, int], group: Group) -> Tensor:
    """Return an uninitialised stack [b, m, n]."""
    return torch.empty(shape, dtype=group.dtype, device=group.device)


def fill(stacks: Sequence[Tensor], members: Mapping[tuple[int, int], Sequence[int]], tensors: Sequence[Tensor]) -> None:
    """Write ``tensors`` [..., m, n], normalised, to the stack [b, m, n] of their size, in the order of ``members``."""
    places: list[Tensor] = []
    for same, stack in zip(members.values(), stacks, strict=True):
        places += torch.split(stack, [num_matrices_of(tensors[index].shape) for index in same])
    normalize_into([tensors[index] for same in members.values() for index in same], places)


def finish(
    longs: Sequence[Long], q: Tensor, members: Mapping[tuple[int, int], Sequence[int]], tensors: Sequence[Tensor],
    kernel: str,
) -> list[Tensor]:  # fmt: skip
    """Do the last product of each stack and cut the results into tensors like the inputs; ``kernel`` ran before it."""
    results: dict[int, Tensor] = {}
    for same, long in zip(members.values(), longs, strict=True):
        dtypes = {tensors[index].dtype for index in same}
        dtype = dtypes.pop() if len(dtypes) == 1 else long.x.dtype
        stack = last_product(long, q, dtype, kernel)
        counts = [num_matrices_of(tensors[index].shape) for index in same]
        parts = torch.split(stack, counts) if max(counts) > 1 else stack.unbind()  # as matrices at once, if they are
        for index, part in zip(same, parts, strict=True):
            like = tensors[index]
            part = part if part.shape == like.shape else part.view(like.shape)
            results[index] = part if dtype == like.dtype else part.to(like.dtype)
    return [results[index] for index in range(len(tensors))]


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which matrices of ``dtype`` are iterated on ``device``."""
    if dtype == torch.float64:
        return torch.float64
    if device.type == "cuda":
        return torch.float16
    return torch.bfloat16 if iterates_in_bfloat16() else torch.float32
