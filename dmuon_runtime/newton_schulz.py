"""Newton-Schulz orthogonalisation of many matrices at once.

The polar factor of a matrix is approached by odd polynomials of its singular values (see
:mod:`dmuon_runtime.coefficients`). Matrices are normalised in float32, then iterated in float16 on CUDA (bounded values
make its longer mantissa worth more than bfloat16's range) and in float32 on a CPU (bfloat16 on request, where it is
faster: :mod:`dmuon_runtime._cpu_precision`); float64 stays float64.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Literal

import torch
from torch import Tensor

from dmuon_runtime._choice_store import choice_store
from dmuon_runtime._ns_checks import checked_restarts, checked_steps, refuse_non_matrices, with_index
from dmuon_runtime._ns_choices import Choices, Form
from dmuon_runtime._ns_graphs import Captured, GraphCache
from dmuon_runtime._ns_groups import (
    Group,
    Recipe,
    by_shape,
    compute_dtype,
    decide_form,
    empty_stack,
    fill,
    finish,
    num_matrices_of,
    rounds,
    stack_shapes,
)
from dmuon_runtime._ns_measure import Measuring
from dmuon_runtime._tables import forget
from dmuon_runtime.coefficients import POLAR_EXPRESS_COEFFICIENTS, Triple, coefficients_for, validate_coefficients
from dmuon_runtime.guard import KernelGuard
from dmuon_runtime.kernels import KERNELS, SymmetricKernel
from dmuon_runtime.kernels._registry import (
    CUBLAS,
    active_kernel,
    check_runs,
    decide_choice,
    default_device,
    say_what_auto_is,
)
from dmuon_runtime.kernels._settings import kernel_from_environment
from dmuon_runtime.ledger import LEDGER
from dmuon_runtime.orthogonality import orthogonality_error
from dmuon_runtime.restarts import default_restarts

__all__ = ["Choices", "NewtonSchulz", "default_restarts", "orthogonality_error"]

Backend = Literal["gram", "direct"]
BACKENDS: Final = ("gram", "direct")


class NewtonSchulz:
    """How to orthogonalise: the form of the iteration, its coefficients, and what computes the symmetric products.

    Args:
        backend: ``gram`` iterates on the Gram matrix of the short side, ``direct`` on the matrix itself. On a CPU
            ``gram`` takes the direct form where that costs fewer FLOPs (square and nearly square matrices), and in
            bfloat16; the ledger shows which ran.
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
        self.restart_iterations = None if restart_iterations is None else checked_restarts(restart_iterations)
        self.deterministic = deterministic
        self._choices, self._adopted = Choices(), False
        self._graphs = GraphCache()
        self.guard: KernelGuard | None = None
        """Watches the calls and takes them to the fallback where a breaker is open; None: nothing is watched."""
        self._falls_back = False
        say_what_auto_is(self.choice.name, default_device())

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
            ValueError: ``steps`` that is no whole number of at least 1, or a restart at or after the last step.
        """
        steps = checked_steps(steps)
        restarts = default_restarts(steps) if self.restart_iterations is None else self.restart_iterations
        late = [restart for restart in restarts if restart >= steps]
        if late:
            raise ValueError(
                f"restart_iterations {late} lie beyond the last of {steps} steps (counted from 0); leave them out"
            )
        return coefficients_for(self.coefficients, steps), restarts

    @property
    def choices(self) -> Choices:
        """What was measured, or adopted, and is used now."""
        return self._choices

    def adopt(self, choices: Choices) -> None:
        """Use ``choices`` from the next call on, and measure nothing any more: what they do not name is not measured.

        This is how ranks come to equal bits: one measures, all adopt. Captured graphs are dropped.
        """
        self._choices, self._adopted = choices, True
        self._graphs.clear()

    @torch.no_grad()
    def measure(
        self,
        calls: Sequence[Sequence[Sequence[int]]],
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None] | None = None,
        steps: int = 5,
    ) -> Choices:
        """Measure what is fastest for ``calls``, use it, and return it; see :meth:`prepare`.

        Args:
            calls: the shapes [..., m, n] of each future call (of this rank, or of all ranks whose bits must agree).
            dtype: of the matrices.
            device: of the matrices; it must be this process's own.
            progress: told in words what is being done, and how far it is.
            steps: of the calls.
        """
        if self._adopted or self.deterministic:
            return self._choices
        device = with_index(device)
        coefficients, restarts = self.plan(steps)
        store = choice_store(device)
        measuring = Measuring(device, compute_dtype(dtype, device), Recipe(coefficients, restarts), store, progress)
        with LEDGER.muted(), torch.cuda.device(device if device.type == "cuda" else -1):
            for shapes in calls:
                measuring.forms(self._forms_of(shapes, dtype, device, Recipe(coefficients, restarts)))
            self._choices = Choices({**self._choices.entries, **measuring.found})
            for shapes in calls:
                for group, members in self._groups_of(shapes, [dtype] * len(shapes), [device] * len(shapes), steps):
                    measuring.tiles(group, stack_shapes([shapes[index] for index in members]))
        self._choices = Choices({**self._choices.entries, **measuring.found})
        self._graphs.clear()
        return self._choices

    def prepare(
        self,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None] | None = None,
        steps: int = 5,
    ) -> Choices:
        """Do now what the first calls of :meth:`orthogonalize` would otherwise do, and measure what is fastest.

        Measured are the tiles of the symmetric products (on Hopper with quack) and, for nearly square matrices, the
        Gram form against the direct form. Winners are kept on disk (``DMUON_CACHE_DIR``, else ``~/.cache/dmuon``) for
        this chip, driver and set of versions, so that a second start measures nothing. On CUDA every kernel of a call
        with ``shapes`` is compiled and its graphs are captured. Nothing is counted in the ledger. After
        :meth:`adopt`, or with ``deterministic``, nothing is measured. Without ``prepare``, static rules decide.

        Args:
            shapes: [..., m, n] of each tensor of the call, in its order.
            dtype: of the matrices.
            device: of the matrices.
            progress: told in words what is being done, and how far it is.
            steps: of the call.

        Returns:
            The decisions, for :meth:`adopt` on other ranks: bits of a result depend on them.
        """
        device = with_index(device)
        self.measure([shapes], dtype, device, progress, steps)
        if device.type == "cuda" and shapes:
            if progress is not None:
                progress(f"compiling kernels and capturing graphs for {sum(map(num_matrices_of, shapes))} matrices")
            self._reserve(shapes, dtype, device, steps)
            matrices = [torch.ones([1] * len(shape), dtype=dtype, device=device).expand(*shape) for shape in shapes]
            with LEDGER.muted():
                for _ in range(2):  # compiles, then captures
                    self.orthogonalize(matrices, steps)
            torch.cuda.synchronize(device)
        return self._choices

    def _reserve(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, steps: int) -> None:
        """Make room for the inputs of the largest group first, so that all graphs share one arena."""
        for group, members in self._groups_of(shapes, [dtype] * len(shapes), [device] * len(shapes), steps):
            self._graphs.inputs(stack_shapes([shapes[index] for index in members]), group.dtype, group.device)

    @torch.no_grad()
    def orthogonalize(self, matrices: Sequence[Tensor], steps: int = 5) -> list[Tensor]:
        """Return the orthogonalised matrices, in the dtype, shape and order of the inputs, which are not modified.

        A matrix of exact zeros gives exact zeros. One with NaN or infinity gives NaN in all its elements, and does
        not touch the others. A matrix without elements comes back as it is.

        Args:
            matrices: floating tensors [..., m, n], any mix of sizes, layouts, dtypes and devices.
            steps: number of iterations.

        Raises:
            ValueError: bad ``steps``, or tensors that are no floating matrices or an empty batch (all of them named).
        """
        return self.all_rounds(matrices, lambda indices: [matrices[index] for index in indices], steps)

    def all_rounds(
        self, like: Sequence[Tensor], load: Callable[[Sequence[int]], list[Tensor]], steps: int = 5
    ) -> list[Tensor]:
        """Return the results of :meth:`each_round` in the order of ``like``, which are then held all at once."""
        results = list(like)
        for members, done in self.each_round(like, load, steps):
            for index, result in zip(members, done, strict=True):
                results[index] = result
        return results

    def each_round(
        self, like: Sequence[Tensor], load: Callable[[Sequence[int]], list[Tensor]], steps: int = 5
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Orthogonalise round by round, so that no more than a round needs to be in memory at once.

        A round holds what runs together (on CUDA about as much as fills the device). :meth:`orthogonalize` does the
        same rounds and gives the same bits. Whoever derives from this class changes this method alone.

        Args:
            like: a tensor [..., m, n] of the shape, dtype and device of each matrix; its elements are not read.
            load: returns the matrices of a round when it begins, each once; they are not modified.
            steps: number of iterations.

        Yields:
            The indices of a round and their results; every tensor is in one round.

        Raises:
            ValueError: as :meth:`orthogonalize`, when the first round is asked for.
        """
        refuse_non_matrices(like)
        recipe = Recipe(*self.plan(steps))
        shapes, dtypes, devices = [g.shape for g in like], [g.dtype for g in like], [g.device for g in like]
        empty = [index for index, shape in enumerate(shapes) if 0 in shape]
        if empty:
            yield empty, [torch.zeros_like(matrix) for matrix in load(empty)]
        for group, members in self._groups_of(shapes, dtypes, devices, steps):
            yield members, self._run_watched(group, recipe, load(members))

    @contextmanager
    def falling_back(self) -> Iterator[None]:
        """Let every matrix go to ``cublas`` inside."""
        self._falls_back = True
        try:
            yield
        finally:
            self._falls_back = False

    def expected(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, steps: int = 5
    ) -> Counter[tuple[str, str]]:
        """Return what a call with ``shapes`` would put into the ledger: matrices by (kernel, algorithm)."""
        found: Counter[tuple[str, str]] = Counter()
        devices = [with_index(device)] * len(shapes)
        for group, members in self._groups_of(shapes, [dtype] * len(shapes), devices, steps):
            found[group.kernel, group.algorithm] += sum(num_matrices_of(shapes[index]) for index in members)
        return found

    def drop_graphs(self) -> None:
        """Free the captured graphs, the memory behind them and what points to it; a later call captures anew."""
        self._graphs.clear()
        forget()

    def _groups_of(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        devices: Sequence[torch.device],
        steps: int,
    ) -> list[tuple[Group, list[int]]]:
        """Return the indices of the tensors that run together, a group in several rounds where one would be too much.

        Empty tensors are in no group.
        """
        recipe = Recipe(*self.plan(steps))
        kinds: defaultdict[tuple[int, int, torch.dtype, torch.device], list[int]] = defaultdict(list)
        for index, (shape, dtype, device) in enumerate(zip(shapes, dtypes, devices, strict=True)):
            if 0 not in shape:
                kinds[shape[-2], shape[-1], dtype, device].append(index)
        units: defaultdict[tuple[Form, torch.device, torch.dtype], list[int]] = defaultdict(list)
        for (rows, columns, dtype, device), members in kinds.items():  # few, where there may be hundreds of tensors
            form = self._form_of((rows, columns), dtype, device, recipe)
            units[form, device, compute_dtype(dtype, device)] += members
        groups: defaultdict[Group, list[int]] = defaultdict(list)
        for (form, device, dtype), members in units.items():
            number = sum(num_matrices_of(shapes[index]) for index in members)
            name = decide_form(form.of(number), self._choices.entries) if self.backend == "gram" else "direct"
            long_dim = 0 if name == "gram" else form.long_dim
            groups[Group(device, dtype, form.short_dim, long_dim, form.kernel, name)] += members
        return [(group, part) for group, places in groups.items() for part in rounds(group, sorted(places), shapes)]

    def _form_of(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, recipe: Recipe) -> Form:
        """Describe one matrix of ``shape`` for the choice of a form."""
        short_dim, long_dim = sorted(shape[-2:])
        compute = compute_dtype(dtype, device)
        kernel = self._preferred(short_dim, long_dim, compute, device)
        if self._falls_back or (kernel is not CUBLAS and self._avoids(kernel.name, short_dim, compute)):
            kernel = CUBLAS
        name = str(compute).removeprefix("torch.")
        return Form(kernel.name, 1, short_dim, long_dim, name, len(recipe.coefficients), len(recipe.restarts))

    def _preferred(self, short_dim: int, long_dim: int, dtype: torch.dtype, device: torch.device) -> SymmetricKernel:
        """Return the chosen kernel, or the fallback where that does not serve such matrices."""
        kernel = active_kernel(self.choice, device)
        return kernel if kernel.serves(short_dim, long_dim, dtype) else CUBLAS

    def _avoids(self, kernel: str, short_dim: int, dtype: torch.dtype) -> bool:
        return self.guard is not None and self.guard.avoids(kernel, short_dim, dtype)

    def _forms_of(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device, recipe: Recipe
    ) -> list[Form]:
        if self.backend == "direct":
            return []
        counts: Counter[Form] = Counter()
        for shape in shapes:
            if 0 not in shape:
                counts[self._form_of(shape, dtype, device, recipe)] += num_matrices_of(shape)
        return [form.of(number) for form, number in counts.items()]

    def _run_watched(self, group: Group, recipe: Recipe, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run a group under the breaker of the kernel that was chosen for it, if that has one."""
        long_dim = max(tensors[0].shape[-2:])
        kernel = self._preferred(group.short_dim, long_dim, group.dtype, group.device)
        if self.guard is None or self._falls_back or kernel is CUBLAS:
            return self._run_group(group, recipe, tensors)
        preferred, fallback = (replace(group, kernel=k.name) for k in (kernel, CUBLAS))
        breaker = self.guard.breaker(kernel.name, group.short_dim, group.dtype)
        runs = [lambda xs, g=g: self._run_group(g, recipe, xs) for g in (preferred, fallback)]
        if group == preferred:
            return self.guard.run(breaker, tensors, *runs)
        self.guard.probe(breaker, tensors, *runs)
        return self._run_group(group, recipe, tensors)

    def _run_group(self, group: Group, recipe: Recipe, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Normalise, iterate (in a graph on CUDA) and cast back; the order of ``tensors`` is kept."""
        members = by_shape([g.shape for g in tensors])
        shapes = stack_shapes([g.shape for g in tensors])
        num_matrices = sum(shape[0] for shape in shapes)
        with LEDGER.orthogonalising(group.kernel, group.algorithm, num_matrices, group.device):
            kernel = KERNELS[group.kernel]  # another one may stand in for a name later
            key = (group, kernel, recipe, shapes, torch.are_deterministic_algorithms_enabled())
            captured = self._graph(key, group, recipe, shapes) if group.device.type == "cuda" else None
            stacks = captured.inputs if captured else [empty_stack(shape, group) for shape in shapes]
            fill(stacks, members, tensors)
            longs, q = recipe.run(group, stacks, self._choices.entries) if captured is None else captured.replay()
            return finish(longs, q, members, tensors, group.kernel)

    def _graph(
        self, key: Hashable, group: Group, recipe: Recipe, shapes: Sequence[tuple[int, int, int]]
    ) -> Captured | None:
        """Return the graph of a group that has run before, captured now if need be.

        None for the first run, and for every run once a capture failed.
        """
        found = self._graphs.find(key)
        if found is None and self._graphs.worth_capturing(key):
            inputs = self._graphs.inputs(shapes, group.dtype, group.device)
            found = self._graphs.capture(key, inputs, lambda stacks: recipe.run(group, stacks, self._choices.entries))
        return found
