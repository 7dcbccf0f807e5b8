"""The optimizer: gradients agreed and checked, then Muon or AdamW on what this rank owns, route by route."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn, cast, overload

import torch
from torch import Tensor, nn

from dmuon_runtime.adamw import AdamWSettings, AdamWTensors, adamw_update
from dmuon_runtime.errors import NonFiniteGradient, ParamGroupError, SettingError, UnsupportedFeature
from dmuon_runtime.groups import GroupDefaults, build_groups, check_numbers, learning_rate
from dmuon_runtime.guard import guarded_orthogonalize
from dmuon_runtime.guests import Guest, find_guests, local_part
from dmuon_runtime.matrix_updates import SCALES, MatrixUpdates, Scale
from dmuon_runtime.newton_schulz import NewtonSchulz
from dmuon_runtime.outcome import StepOutcome, UpdateTotals
from dmuon_runtime.pieces import Piece, collect_pieces
from dmuon_runtime.progress import PROGRESS
from dmuon_runtime.roster import Roster
from dmuon_runtime.runtime import clear_with, find_runtime, inner_model
from dmuon_runtime.schedule import Call
from dmuon_runtime.spans import start_span

__all__ = ["Muon"]


class Muon(torch.optim.Optimizer):
    """Muon and AdamW for a dedicated model; every call but :meth:`zero_grad` is collective.

    ``param_groups`` holds one group for each route (of each group given), with ``route`` and its own ``lr``, so
    schedulers keep the ratio. State exists from construction, for what this rank owns. A parameter for which no
    rank had a gradient is left alone: no momentum, no decay. ``non_finite`` says what an infinite or NaN gradient does:
    ``skip`` leaves all weights and state as they are, ``raise`` raises :class:`NonFiniteGradient` on all ranks.
    With replicas or replicated storage new weights are published after the update: with ``replicate_async`` behind the
    next forward, whose units wait for theirs; else before :meth:`step` returns. The results are the same bit by bit.
    A model has one Muon at a time: another is refused (:class:`AlreadyOptimized`) while the first is alive.
    ``orthogonalized`` counts the matrices that came back from Newton-Schulz, by parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_backend: str | NewtonSchulz = "gram",
        scale: Scale = "match_rms_adamw",
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.01,
        param_groups: Sequence[Mapping[str, object]] | None = None,
        replicate_async: bool = True,
        non_finite: Literal["skip", "raise"] = "skip",
    ) -> None:
        _check_settings(scale, non_finite, ns_steps)
        runtime = find_runtime(model)
        self.guests = find_guests(model, runtime)
        runtime.refuse_second_optimizer()
        defaults = GroupDefaults(lr, momentum, weight_decay, adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        groups = build_groups(runtime, param_groups, defaults, self.guests)
        check_numbers(groups)
        super().__init__(groups, {})
        self.runtime, self._roster = runtime, Roster(inner_model(model))
        if model is not inner_model(model):
            clear_with(model, runtime)
        self.nesterov, self.ns_steps, self.scale, self.non_finite = nesterov, ns_steps, scale, non_finite
        self.replicate_async = replicate_async
        self.newton_schulz = _newton_schulz_of(ns_backend, ns_steps)
        self.last_step: StepOutcome | None = None
        self.orthogonalized: Counter[str] = Counter()
        self.clip_norm: Tensor | None = None
        """Norm found by the clip that belongs to the coming step."""
        self._kept_places: dict[tuple[int, ...], Tensor] = {}
        self.pieces = collect_pieces(runtime, {id(p): g["route"] for g in self.param_groups for p in g["params"]})
        self._make_state()
        runtime.optimizers.add(self)

    def _make_state(self) -> None:
        members: list[Piece | Guest] = [*self.pieces, *self.guests]
        for member in members:
            self.state[member.parameter] = member.make_state()

    def set_newton_schulz(self, newton_schulz: NewtonSchulz) -> None:
        """Use another :class:`NewtonSchulz` from the next step on."""
        self.newton_schulz = newton_schulz

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard every gradient: local, in flight and reduced. No communication."""
        self.runtime.watch.note_outside()
        self.runtime.schedule.zero_grad()
        for guest in self.guests:
            guest.parameter.grad = None
        self.clip_norm = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse once the optimizer is built: who trains, and where, is settled by then."""
        if hasattr(self, "runtime"):
            raise ParamGroupError(
                "a group cannot be added to a built Muon: its parameters would have no owner. Make all parameters "
                "before dedicate_params, and give all groups to Muon as param_groups"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: torch would hand state out by position, and in the parameter's dtype."""
        raise UnsupportedFeature(
            "Muon.load_state_dict goes by position, and state belongs to a name; use "
            "dmuon.get_optimizer_state_dict and dmuon.set_optimizer_state_dict"
        )

    def __deepcopy__(self, _memo: object) -> NoReturn:
        """Refuse: it would be a second Muon of the model."""
        raise UnsupportedFeature(
            "copy.deepcopy of a Muon would update the same weights with a state of its own; to keep its state use "
            "dmuon.get_optimizer_state_dict(model, optimizer), on all ranks"
        )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every weight that has a gradient on some rank; ``last_step`` then tells what happened.

        Without a guard, an error of a Newton-Schulz kernel leaves the matrices updated whose round came before it.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        runtime = self.runtime
        self._roster.check()
        PROGRESS.enter("reduce")
        runtime.watch.note_outside()
        present = runtime.schedule.meet(Call.STEP)
        pieces = [piece for piece in self.pieces if present[piece.index]]
        flags = runtime.transport.sum_values(self._non_finite_flags(pieces))
        names = [entry.name for entry in runtime.plan.parameters] + [guest.name for guest in self.guests]
        outcome = StepOutcome(flags, names, self.clip_norm)
        self.last_step, self.clip_norm = outcome, None
        on_host = flags.device.type == "cpu"
        if self.non_finite == "raise" and outcome.skipped:
            raise NonFiniteGradient(
                f"infinite or NaN gradient of {', '.join(outcome.offenders)}; nothing was updated. Lower the learning "
                'rate, look at the batch, or pass non_finite="skip"',
                outcome.offenders,
            )
        if not (on_host and outcome.skipped):
            gate = None if on_host or self.non_finite == "raise" else (flags.sum() == 0).to(torch.float32)
            runtime.schedule.wait_published()
            PROGRESS.enter("newton_schulz")
            span = start_span(flags.device)
            outcome.computed = True
            outcome.updates_by_route = self._apply([*pieces, *(g for g in self.guests if g.has_gradient)], gate)
            span.finish()
            PROGRESS.enter("publish")
            runtime.schedule.publish(present, wait=not self.replicate_async)
            runtime.counters.add_owner_compute(span, sum(self._num_matrices[piece.index] for piece in pieces))
        runtime.schedule.end_step()

    def _non_finite_flags(self, pieces: Sequence[Piece]) -> Tensor:
        """Return [parameters of the plan, guests], 1 where this rank's part of the mean gradient is not finite."""
        num_own = len(self.runtime.plan.parameters)
        flags = torch.zeros(num_own + len(self.guests), device=self.runtime.transport.device)
        present = {num_own + i: guest for i, guest in enumerate(self.guests) if guest.has_gradient}
        gradients = [*(piece.gradient for piece in pieces), *(guest.gradient for guest in present.values())]
        if gradients and not self._host_sees_finite(pieces, present.values()):
            largest = torch.stack(torch._foreach_norm(gradients, float("inf")))
            places = self._places((*(piece.index for piece in pieces), *present))
            flags[places] = (~torch.isfinite(largest)).to(flags.dtype)
        return flags

    @cached_property
    def _num_matrices(self) -> dict[int, int]:
        """Matrices of each piece, by the index of its parameter."""
        return {piece.index: piece.plan.num_matrices for piece in self.pieces}

    def _host_sees_finite(self, pieces: Iterable[Piece], guests: Iterable[Guest]) -> bool:
        """Return True where a CPU knows at little cost that all gradients are finite: by the sum of each bucket."""
        if self.runtime.transport.device.type != "cpu":
            return False
        buckets = {id(piece.bucket): piece.bucket.gradient for piece in pieces}
        flat = [gradient for gradient in buckets.values() if gradient is not None]
        return all(math.isfinite(float(g.sum())) for g in (*flat, *(guest.gradient for guest in guests)))

    def _places(self, key: tuple[int, ...]) -> Tensor:
        """Return indices as a tensor on the device; kept, because a copy from the host would synchronise."""
        if key not in self._kept_places:
            self._kept_places = {key: torch.tensor(key, device=self.runtime.transport.device)}
        return self._kept_places[key]

    def _apply(self, pieces: Sequence[Piece | Guest], gate: Tensor | None) -> dict[str, UpdateTotals]:
        by_parameter = {id(piece.parameter): piece for piece in pieces}
        totals: dict[str, UpdateTotals] = {}
        muon: list[tuple[Piece, Mapping[str, object]]] = []
        for group in self.param_groups:
            members = [by_parameter[id(p)] for p in group["params"] if id(p) in by_parameter]
            if group["route"] == "muon":
                muon.extend((piece, group) for piece in members if isinstance(piece, Piece))
            else:
                squares = adamw_update(self._adamw_tensors(members), _adamw_settings(group), gate)
                counted = [(s, piece) for s, piece in zip(squares, members, strict=True) if piece.counts_here]
                total = totals.setdefault(group["route"], UpdateTotals())
                total.add_squares([s for s, _ in counted], sum(piece.master.numel() for _, piece in counted))
        squares = self._muon_update(muon, gate)
        if muon:
            totals["muon"] = UpdateTotals()
            totals["muon"].add_squares(squares, sum(piece.master.numel() for piece, _ in muon))
        return totals

    def _adamw_tensors(self, pieces: Sequence[Piece | Guest]) -> AdamWTensors:
        states = [self.state[piece.parameter] for piece in pieces]
        return AdamWTensors(
            weights=[piece.master for piece in pieces],
            gradients=[piece.gradient for piece in pieces],
            exp_avgs=[local_part(state["exp_avg"]) for state in states],
            exp_avg_sqs=[local_part(state["exp_avg_sq"]) for state in states],
            steps=[state["step"] for state in states],
        )

    def _muon_update(self, members: Sequence[tuple[Piece, Mapping[str, object]]], gate: Tensor | None) -> list[Tensor]:
        """Momentum, Newton-Schulz over all matrices of this rank, decay and update; see :class:`MatrixUpdates`.

        Returns sums of squares of the changes before decay.
        """
        updates = MatrixUpdates(
            [(piece, cast(Tensor, self.state[piece.parameter]["momentum_buffer"]), group) for piece, group in members],
            nesterov=self.nesterov,
            scale=self.scale,
            gate=gate,
        )
        for indices, results in self._rounds(updates):
            updates.apply(indices, results)
            del results  # else a second round would be held while the next one runs
        self.orthogonalized.update(updates.orthogonalized)
        return updates.squares

    def _rounds(self, updates: MatrixUpdates) -> Iterator[tuple[Sequence[int], list[Tensor]]]:
        """Yield indices and results as they come; with a guard all at once, after all ranks have agreed on them.

        The gate of ``updates`` is closed too where a device found a kernel's result bad on some rank.
        """
        newton_schulz = self.newton_schulz
        if newton_schulz.guard is None:
            yield from newton_schulz.each_round(updates.like, updates.load, self.ns_steps)
            return
        transport = self.runtime.transport
        results, good = guarded_orthogonalize(newton_schulz, transport, updates.like, updates.load, self.ns_steps)
        if good is not None:
            updates.gate = good if updates.gate is None else updates.gate * good
        yield range(len(results)), results


def _adamw_settings(group: Mapping[str, object]) -> AdamWSettings:
    return AdamWSettings(
        lr=learning_rate(group),
        betas=cast("tuple[float, float]", group["betas"]),
        eps=cast(float, group["eps"]),
        weight_decay=cast(float, group["weight_decay"]),
    )


def _newton_schulz_of(backend: str | NewtonSchulz, steps: int) -> NewtonSchulz:
    if not isinstance(backend, NewtonSchulz):
        if backend not in ("gram", "direct"):
            raise SettingError(f'ns_backend must be "gram", "direct" or a NewtonSchulz, not {backend!r}')
        backend = NewtonSchulz(backend=cast('Literal["gram", "direct"]', backend))
    backend.plan(steps)  # refuses restarts beyond the steps
    return backend


def _check_settings(scale: str, non_finite: str, ns_steps: int) -> None:
    mistakes: list[str] = []
    if scale not in SCALES:
        mistakes.append(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    if non_finite not in ("skip", "raise"):
        mistakes.append(f'non_finite must be "skip" or "raise", not {non_finite!r}')
    if not isinstance(ns_steps, int) or ns_steps < 1:
        mistakes.append(f"ns_steps must be a whole number of at least 1, not {ns_steps!r}")
    if mistakes:
        raise SettingError("; ".join(mistakes), mistakes)
