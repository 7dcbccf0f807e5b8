"""Newton-Schulz orthogonalisation of many matrices at once.

The polar factor of a matrix is approached by odd polynomials of its singular values (see
:mod:`dmuon_runtime.coefficients`). Matrices are normalised in float32, then iterated in float16 on CUDA (bounded values
make its longer mantissa worth more than bfloat16's range) and in float32 on a CPU; float64 stays float64.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from dmuon_runtime._elementwise import normalize_into
from dmuon_runtime._last_product import last_product
from dmuon_runtime._ns_graphs import Captured, GraphCache, Unfinished
from dmuon_runtime._ns_iterations import Long, decide_algorithm, direct_iteration, gram_iteration
from dmuon_runtime.coefficients import POLAR_EXPRESS_COEFFICIENTS, Triple, coefficients_for, validate_coefficients
from dmuon_runtime.kernels import KERNELS
from dmuon_runtime.kernels._registry import (
    CUBLAS,
    active_kernel,
    check_runs,
    decide_choice,
    default_device,
)
from dmuon_runtime.kernels._settings import kernel_from_environment
from dmuon_runtime.ledger import LEDGER

__all__ = [
    "NewtonSchulz", "default_restarts", "direct_newton_schulz", "gram_newton_schulz", "newton_schulz",
    "orthogonality_error",
]  # fmt: skip

Backend = Literal["gram", "direct"]
BACKENDS: Final = ("gram", "direct")


def default_restarts(steps: int) -> tuple[int, ...]:
    """Return the steps before which the Gram form starts anew: 3, then every second one.

    The published default is 2. At 3 the FLOPs are the same, and emulated float16 brings the error back to that of the
    direct form (2 to 8 times smaller than at 2), except at effective rank 1: before the first restart the Gram matrix
    has norm 1 at most and tolerates three steps, after it its singular values are near 1 and tolerate two.
    """
    return tuple(range(3, steps, 2))


class NewtonSchulz:
    """How to orthogonalise: the form of the iteration, its coefficients, and what computes the symmetric products.

    Args:
        backend: ``gram`` iterates on the Gram matrix of the short side, ``direct`` on the matrix itself. On a CPU
            ``gram`` takes the direct form where that costs fewer FLOPs (square and nearly square matrices); the
            ledger shows which ran.
        kernel: ``auto``, ``quack``, ``cute_sm80``, ``blocked`` or ``cublas``.
        coefficients: triples (a, b, c); None is Polar Express.
        restart_iterations: steps (0-based) before which the Gram form starts anew; None is :func:`default_restarts`.
        deterministic: ``cublas`` where nothing else names a kernel.

    Raises:
        ValueError: unknown backend or kernel, unusable coefficients or restarts.
        KernelUnavailable: a named kernel cannot run on this machine.
    """

    def __init__(
        self,
        backend: Backend = "gram",
        kernel: str = "auto",
        coefficients: Sequence[Sequence[float]] | None = None,
        restart_iterations: Sequence[int] | None = None,
        deterministic: bool = False,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is no form of Newton-Schulz; there are {', '.join(BACKENDS)}")
        self.backend: Backend = backend
        self.choice = decide_choice(kernel, kernel_from_environment(), deterministic)
        check_runs(self.choice, default_device())
        if deterministic and self.choice.name not in ("auto", CUBLAS.name):
            warnings.warn(
                f"deterministic=True means cublas, but the {self.choice.decided_by} says {self.choice.name}: it runs",
                stacklevel=2,
            )
        self.coefficients = POLAR_EXPRESS_COEFFICIENTS if coefficients is None else validate_coefficients(coefficients)
        self.restart_iterations = None if restart_iterations is None else _checked_restarts(restart_iterations)
        self._graphs = GraphCache()

    def __repr__(self) -> str:
        return f"NewtonSchulz(backend={self.backend!r}, kernel={self.choice.name!r})"

    def __call__(self, matrix: Tensor, steps: int = 5) -> Tensor:
        """Orthogonalise one tensor; see :meth:`orthogonalize`."""
        return self.orthogonalize([matrix], steps)[0]

    def kernel_on(self, device: torch.device) -> str:
        """Name of the kernel that matrices on ``device`` go to now, ``auto`` resolved."""
        return active_kernel(self.choice, device).name

    def plan(self, steps: int) -> tuple[tuple[Triple, ...], tuple[int, ...]]:
        """Return the coefficients and restarts of a call with ``steps`` steps.

        Raises:
            ValueError: ``steps`` below 1, or a restart at or after the last step.
        """
        if steps < 1:
            raise ValueError(f"Newton-Schulz needs at least 1 step, found {steps}")
        restarts = default_restarts(steps) if self.restart_iterations is None else self.restart_iterations
        late = [restart for restart in restarts if restart >= steps]
        if late:
            raise ValueError(
                f"restart_iterations {late} lie beyond the last of {steps} steps (counted from 0); leave them out"
            )
        return coefficients_for(self.coefficients, steps), restarts

    @torch.no_grad()
    def orthogonalize(self, matrices: Sequence[Tensor], steps: int = 5) -> list[Tensor]:
        """Return the orthogonalised matrices, in the dtype, shape and order of the inputs, which are not modified.

        A matrix of exact zeros gives exact zeros. One with NaN or infinity gives NaN in all its elements, and does
        not touch the others. Zero-size dims are allowed.

        Args:
            matrices: floating tensors [..., m, n], any mix of sizes, layouts, dtypes and devices.
            steps: number of iterations.

        Raises:
            ValueError: bad ``steps``, or tensors that are no floating matrices (all of them named).
        """
        _refuse_non_matrices(matrices)
        coefficients, restarts = self.plan(steps)
        recipe = _Recipe(coefficients, restarts)
        results = [g.new_zeros(g.shape) if g.numel() == 0 else g for g in matrices]
        groups: defaultdict[_Group, list[int]] = defaultdict(list)
        for index, g in enumerate(matrices):
            if g.numel():
                groups[self._group_of(g, steps, len(restarts))].append(index)
        for group, members in groups.items():
            done = self._run_group(group, recipe, [matrices[index] for index in members])
            for index, result in zip(members, done, strict=True):
                results[index] = result
        return results

    def _group_of(self, g: Tensor, steps: int, num_restarts: int) -> _Group:
        short_dim, long_dim = sorted(g.shape[-2:])
        dtype = _compute_dtype(g)
        kernel = active_kernel(self.choice, g.device)
        if not kernel.serves(short_dim, long_dim, dtype):
            kernel = CUBLAS
        algorithm: str = self.backend
        if algorithm == "gram":
            share = kernel.product_share
            algorithm = decide_algorithm(short_dim, long_dim, steps, num_restarts, share)
        return _Group(g.device, dtype, short_dim, 0 if algorithm == "gram" else long_dim, kernel.name, algorithm)

    def _run_group(self, group: _Group, recipe: _Recipe, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Normalise, iterate (in a graph on CUDA) and cast back; the order of ``tensors`` is kept."""
        members = _by_shape(tensors)
        shapes = tuple((sum(_num_matrices(tensors[i]) for i in same), *shape) for shape, same in members.items())
        num_matrices = sum(shape[0] for shape in shapes)
        with LEDGER.orthogonalising(group.kernel, group.algorithm, num_matrices, group.device):
            key = (group, recipe, shapes, torch.are_deterministic_algorithms_enabled())
            captured = self._graph(key, group, recipe, shapes) if group.device.type == "cuda" else None
            stacks = captured.inputs if captured else [_empty(shape, group) for shape in shapes]
            for same, stack in zip(members.values(), stacks, strict=True):
                _fill(stack, [tensors[index] for index in same])
            longs, q = recipe.run(group, stacks) if captured is None else captured.replay()
            return _finish(longs, q, members, tensors)

    def _graph(
        self, key: Hashable, group: _Group, recipe: _Recipe, shapes: Sequence[tuple[int, int, int]]
    ) -> Captured | None:
        """Return the graph of a group that has run before, captured now if need be; None for the first run."""
        found = self._graphs.find(key)
        if found is None and self._graphs.worth_capturing(key):
            inputs = self._graphs.inputs(shapes, group.dtype, group.device)
            found = self._graphs.capture(key, inputs, lambda stacks: recipe.run(group, stacks))
        return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Matrices that go through one sequence of launches: everything that could change that work."""

    device: torch.device
    dtype: torch.dtype
    short_dim: int
    long_dim: int
    """0 where matrices of different long sides share the group."""
    kernel: str
    algorithm: str


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The polynomial: coefficients and restarts."""

    coefficients: tuple[Triple, ...]
    restarts: tuple[int, ...]

    def run(self, group: _Group, stacks: Sequence[Tensor]) -> Unfinished:
        """Iterate on normalised stacks [b, rows, cols]."""
        kernel = KERNELS[group.kernel]
        if group.algorithm == "gram":
            return gram_iteration(stacks, self.coefficients, self.restarts, kernel)
        return direct_iteration(stacks, self.coefficients, kernel)


def _num_matrices(g: Tensor) -> int:
    return math.prod(g.shape[:-2])


def _by_shape(tensors: Sequence[Tensor]) -> dict[tuple[int, int], list[int]]:
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, g in enumerate(tensors):
        members[g.shape[-2], g.shape[-1]].append(index)
    return members


def _empty(shape: tuple[int, int, int], group: _Group) -> Tensor:
    return torch.empty(shape, dtype=group.dtype, device=group.device)


def _fill(stack: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write ``tensors`` [..., m, n], normalised, one after the other to ``stack`` [b, m, n]."""
    begin = 0
    for g in tensors:
        end = begin + _num_matrices(g)
        normalize_into(g, stack[begin:end])
        begin = end


def _finish(
    longs: Sequence[Long], q: Tensor, members: Mapping[tuple[int, int], Sequence[int]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Do the last product of each stack and cut the results into tensors like the inputs."""
    results: dict[int, Tensor] = {}
    for same, long in zip(members.values(), longs, strict=True):
        dtypes = {tensors[index].dtype for index in same}
        stack = last_product(*long.operands(q), dtypes.pop() if len(dtypes) == 1 else long.x.dtype)
        parts = torch.split(stack, [_num_matrices(tensors[index]) for index in same])
        for index, part in zip(same, parts, strict=True):
            like = tensors[index]
            results[index] = part.reshape(like.shape).to(like.dtype)
    return [results[index] for index in range(len(tensors))]


def _compute_dtype(g: Tensor) -> torch.dtype:
    if g.dtype == torch.float64:
        return torch.float64
    return torch.float16 if g.device.type == "cuda" else torch.float32


def _refuse_non_matrices(matrices: Sequence[Tensor]) -> None:
    bad = [
        f"[{index}] {tuple(g.shape)} {g.dtype}"
        for index, g in enumerate(matrices)
        if g.dim() < 2 or not g.dtype.is_floating_point
    ]
    if bad:
        raise ValueError(f"Newton-Schulz takes floating tensors [..., m, n], found {'; '.join(bad)}")


def _checked_restarts(restarts: Sequence[int]) -> tuple[int, ...]:
    bad = [restart for restart in restarts if restart < 1]
    if bad or len(set(restarts)) != len(restarts):
        raise ValueError(f"restart_iterations must be different steps of at least 1, found {list(restarts)}")
    return tuple(sorted(restarts))


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    *,
    coefficients: Sequence[Sequence[float]] | None = None,
    restart_iterations: Sequence[int] | None = None,
) -> Tensor:
    """Orthogonalise ``matrix`` [..., m, n] with the defaults of :class:`NewtonSchulz`."""
    return NewtonSchulz(coefficients=coefficients, restart_iterations=restart_iterations)(matrix, steps)


def gram_newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    *,
    coefficients: Sequence[Sequence[float]] | None = None,
    restart_iterations: Sequence[int] | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Orthogonalise ``matrix`` [..., m, n] through its Gram matrix."""
    ns = NewtonSchulz("gram", "auto", coefficients, restart_iterations, deterministic)
    return ns(matrix, steps)


def direct_newton_schulz(
    matrix: Tensor, steps: int = 5, *, coefficients: Sequence[Sequence[float]] | None = None
) -> Tensor:
    """Orthogonalise ``matrix`` [..., m, n] by the classic form."""
    return NewtonSchulz("direct", coefficients=coefficients)(matrix, steps)


@torch.no_grad()
def orthogonality_error(matrix: Tensor) -> Tensor:
    """Return the largest ``|sigma^2 - 1|`` over the singular values of each matrix of ``matrix`` [..., m, n]: [...].

    Computed from the eigenvalues of the Gram matrix of the short side. A matrix of exact zeros has no direction to
    orthogonalise and gives 0, an empty one too, and one with NaN or infinity gives infinity.
    """
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2], dtype=torch.float32)
    x = matrix if matrix.dtype == torch.float64 else matrix.float()
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    finite = x.isfinite().all(dim=-1).all(dim=-1)
    x = torch.where(finite[..., None, None], x, 0.0)
    error = (torch.linalg.eigvalsh(x @ x.mT) - 1).abs().amax(dim=-1)
    error = torch.where((x == 0).all(dim=-1).all(dim=-1), 0.0, error)
    return torch.where(finite, error, torch.inf)
