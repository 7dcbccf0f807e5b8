"""``MuonAdamW``: Muon for matrices that the caller selects, AdamW for the rest; strict, and on whole tensors only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from dmuon_runtime._muon_adamw_manifest import check_gradients, check_rate, check_unchanged, make_manifest
from dmuon_runtime._muon_adamw_record import RECORD_VERSION, AdamWState, MuonAdamWRecord, check_record
from dmuon_runtime.adamw import AdamWSettings, AdamWTensors, adamw_update
from dmuon_runtime.coefficients import coefficients_for
from dmuon_runtime.errors import GradientMismatch, SelectionError, SettingError
from dmuon_runtime.matrix_updates import Scale, update_scale
from dmuon_runtime.newton_schulz import NewtonSchulz
from dmuon_runtime.updates import apply_changes

__all__ = ["MuonAdamW"]

_RATIO = 0.015
Convention = Literal["sgd", "ema"]


@dataclass(frozen=True)
class _Settings:
    """What gives the state its meaning: part of the configuration key, and never changed."""

    momentum: float
    momentum_convention: Convention
    nesterov: bool
    weight_decay: float
    ns_steps: int
    scale: Scale
    adamw_betas: tuple[float, float]
    adamw_eps: float
    adamw_weight_decay: float
    adamw_lr_ratio: float | None

    def __post_init__(self) -> None:
        mistakes = [
            f"{name} must be at least 0 and below 1, not {value!r}"
            for name, value in (("momentum", self.momentum), *zip(("beta1", "beta2"), self.adamw_betas, strict=True))
            if not 0.0 <= value < 1.0
        ]
        for name in ("weight_decay", "adamw_eps", "adamw_weight_decay"):
            check_rate(name, getattr(self, name))
        if self.momentum_convention not in ("sgd", "ema"):
            mistakes.append(f'momentum_convention must be "sgd" or "ema", not {self.momentum_convention!r}')
        if self.scale not in ("match_rms_adamw", "original", "none"):
            mistakes.append(f"scale must be match_rms_adamw, original or none, not {self.scale!r}")
        if self.ns_steps < 1:
            mistakes.append(f"ns_steps must be at least 1, not {self.ns_steps!r}")
        if mistakes:
            raise SettingError("; ".join(mistakes), mistakes)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for ``muon_parameters`` and AdamW for every other trainable parameter of ``model``; nothing is guessed.

    Args:
        model: on plain tensors, not sharded (under DDP it may be).
        muon_parameters: full names or the parameters themselves, matrices all. Do not select embeddings, output heads.
        lr: of Muon. AdamW's is ``adamw_lr``, or ``lr * adamw_lr_ratio`` (default 0.015) where that is None.
        momentum_convention: ``sgd`` accumulates ``m <- mu m + g``, ``ema`` averages ``m <- mu m + (1 - mu) g``.
        scale: see :func:`dmuon_runtime.matrix_updates.update_scale`.
        newton_schulz: None is the default :class:`NewtonSchulz`.

    Every step checks the metadata of model, gradients and rates before anything moves. A parameter without a gradient
    keeps its weight, momentum and count; a tied one moves once. Values are not looked at: the caller decides, alike on
    all replicas, whether a step with non-finite gradients is skipped.

    Raises:
        SelectionError: the selection is empty, or has duplicates, unknown, frozen, non-floating or non-matrix members.
        SettingError: a setting or a rate that means nothing.
        UnsupportedFeature: sharded parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        muon_parameters: Sequence[str | nn.Parameter],
        lr: float = 0.02,
        *,
        adamw_lr: float | None = None,
        adamw_lr_ratio: float | None = None,
        momentum: float = 0.95,
        momentum_convention: Convention = "sgd",
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        scale: Scale = "match_rms_adamw",
        newton_schulz: NewtonSchulz | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.01,
    ) -> None:
        if adamw_lr is not None and adamw_lr_ratio is not None:
            raise SettingError("give adamw_lr or adamw_lr_ratio, not both: each says what AdamW's rate is")
        ratio = None
        if adamw_lr is None:
            ratio = check_rate("adamw_lr_ratio", _RATIO if adamw_lr_ratio is None else adamw_lr_ratio)
        self.settings = _Settings(
            momentum, momentum_convention, nesterov, weight_decay, ns_steps, scale, adamw_betas, adamw_eps,
            adamw_weight_decay, ratio,
        )  # fmt: skip
        self.newton_schulz = newton_schulz or NewtonSchulz()
        self.newton_schulz.plan(ns_steps)  # refuses restarts beyond the steps
        rates = self._rates(lr, adamw_lr)
        self._model = model
        self._manifest, self._parameters = make_manifest(model, list(muon_parameters))
        self._first_name = {name: entry.name for entry in self._manifest for name in entry.names}
        self._sealed = False
        super().__init__(self._groups(rates), {})
        self._sealed = True

    def _groups(self, rates: tuple[float, float]) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for route, selected, rate in (("muon", True, rates[0]), ("adamw", False, rates[1])):
            names = [entry.name for entry in self._manifest if entry.trains and entry.selected == selected]
            if names:
                groups.append({"params": [(n, self._parameters[n]) for n in names], "route": route, "lr": rate})
        return groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the selection is made: a parameter that joins later was never checked."""
        if getattr(self, "_sealed", False):
            raise SelectionError("the selection of a MuonAdamW is final; make a new one for the changed model")
        super().add_param_group(param_group)

    @property
    def config_key(self) -> str:
        """The settings that a record must share, as text."""
        ns = self.newton_schulz
        iteration = {
            "backend": ns.backend,
            "coefficients": coefficients_for(ns.coefficients, self.settings.ns_steps),
            "restarts": ns.restart_iterations,
        }
        return f"muon-adamw-v{RECORD_VERSION}:{json.dumps(asdict(self.settings) | iteration, sort_keys=True)}"

    @property
    def muon_parameter_count(self) -> int:
        """Number of distinct parameters that Muon trains."""
        return sum(entry.selected for entry in self._manifest)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update by the gradients on the parameters with the rates of ``param_groups``; see :meth:`step_with_lrs`."""
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = {str(group["route"]): group["lr"] for group in self.param_groups}
        self.step_with_lrs(rates["muon"], rates.get("adamw", 0.0))
        return loss

    @torch.no_grad()
    def step_with_lrs(
        self,
        muon_lr: float,
        adamw_lr: float | None = None,
        *,
        gradients: Mapping[str, Tensor] | None = None,
        skip: bool = False,
    ) -> None:
        """Update with these rates, whatever ``param_groups`` says, or with ``skip`` do nothing at all.

        Args:
            adamw_lr: None is ``muon_lr * adamw_lr_ratio``; needed where the optimizer was made with two rates.
            gradients: by full name, instead of those on the parameters.

        Raises:
            SettingError: a rate that is negative, not finite or beyond float32.
            ParametersChanged: the model is not the one that was selected from.
            GradientMismatch: a gradient belongs to no trainable parameter, or differs in shape, dtype or device.
            UnsupportedFeature: a parameter or gradient is sharded.
            In each case nothing was updated.
        """
        if skip:
            return
        rates = self._rates(muon_lr, adamw_lr)
        check_unchanged(self._manifest, self._parameters, self._model)
        found = self._found_gradients() if gradients is None else self._named_gradients(gradients)
        check_gradients(self._parameters, found)
        selected = [e.name for e in self._manifest if e.selected and e.name in found]
        others = [e.name for e in self._manifest if not e.selected and e.name in found]
        self._muon_step(rates[0], {name: found[name] for name in selected})
        self._adamw_step(rates[1], {name: found[name] for name in others})

    def record(self) -> MuonAdamWRecord:
        """Return copies of all state and the rates."""
        muon: dict[str, Tensor] = {}
        adamw: dict[str, AdamWState] = {}
        for entry in self._manifest:
            state = self.state.get(self._parameters[entry.name])
            if state and entry.selected:
                muon[entry.name] = state["momentum_buffer"].clone()
            elif state:
                adamw[entry.name] = AdamWState(**{key: value.clone() for key, value in state.items()})
        rates = {
            str(group["route"]): {key: float(value) for key, value in group.items() if key in ("lr", "initial_lr")}
            for group in self.param_groups
        }
        return MuonAdamWRecord(RECORD_VERSION, self.config_key, self._manifest, rates, muon, adamw)

    def load_record(self, record: MuonAdamWRecord) -> None:
        """Replace all state and rates by those of ``record``.

        Raises:
            StateMismatch: another version, configuration, momentum convention, selection or model; nothing was loaded.
        """
        check_record(record, self.config_key, self._manifest)
        self.state.clear()
        for name, buffer in record.muon.items():
            self._keep(name, momentum_buffer=buffer)
        for name, state in record.adamw.items():
            self._keep(name, **vars(state))
        for group in self.param_groups:
            group.update(record.rates[str(group["route"])])

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`record` as plain containers."""
        return self.record().to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; raises as :meth:`load_record` does."""
        self.load_record(MuonAdamWRecord.from_dict(state_dict))

    def _keep(self, name: str, **tensors: Tensor) -> None:
        parameter = self._parameters[name]
        self.state[parameter] = {key: value.to(parameter.device, copy=True) for key, value in tensors.items()}

    def _rates(self, muon_lr: float, adamw_lr: float | None) -> tuple[float, float]:
        muon = check_rate("muon_lr", muon_lr)
        if adamw_lr is None:
            if self.settings.adamw_lr_ratio is None:
                raise SettingError("adamw_lr is needed in each step: this optimizer was made with two rates, no ratio")
            return muon, check_rate("adamw_lr", muon * self.settings.adamw_lr_ratio)
        return muon, check_rate("adamw_lr", adamw_lr)

    def _found_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _named_gradients(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        twice: list[str] = []
        for name, gradient in gradients.items():
            first = self._first_name.get(name, name)
            if first in found:
                twice.append(f"{name}: {first} is the same tensor and has a gradient already")
            found[first] = gradient
        if twice:
            raise GradientMismatch("nothing was updated: " + "; ".join(twice), twice)
        return found

    def _muon_step(self, rate: float, gradients: Mapping[str, Tensor]) -> None:
        """Everything that can fail is computed before the first weight or buffer is written."""
        if not gradients:
            return
        settings = self.settings
        momenta = {name: self._next_momentum(name, gradient) for name, gradient in gradients.items()}
        ahead = [self._ahead(gradients[name], momenta[name]) for name in gradients]
        updates = self.newton_schulz.orthogonalize(ahead, settings.ns_steps)
        parameters = [self._parameters[name] for name in gradients]
        for parameter, momentum in zip(parameters, momenta.values(), strict=True):
            self.state[parameter]["momentum_buffer"] = momentum
        scales = [update_scale(settings.scale, *parameter.shape) for parameter in parameters]
        apply_changes(parameters, updates, scales, rate, rate * settings.weight_decay, None)

    def _next_momentum(self, name: str, gradient: Tensor) -> Tensor:
        buffer = self.state.get(self._parameters[name], {}).get("momentum_buffer")
        before = torch.zeros_like(gradient) if buffer is None else cast(Tensor, buffer)
        if self.settings.momentum_convention == "ema":
            return before.lerp(gradient, 1 - self.settings.momentum)
        return before.mul(self.settings.momentum).add_(gradient)

    def _ahead(self, gradient: Tensor, momentum: Tensor) -> Tensor:
        """Return what is orthogonalised: with nesterov one more momentum step ahead."""
        if not self.settings.nesterov:
            return momentum
        if self.settings.momentum_convention == "ema":
            return gradient.lerp(momentum, self.settings.momentum)
        return gradient.add(momentum, alpha=self.settings.momentum)

    def _adamw_step(self, rate: float, gradients: Mapping[str, Tensor]) -> None:
        parameters = [self._parameters[name] for name in gradients]
        for parameter in parameters:
            if not self.state[parameter]:
                zeros = torch.zeros_like(parameter)
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        states = [self.state[parameter] for parameter in parameters]
        tensors = AdamWTensors(
            weights=parameters,
            gradients=list(gradients.values()),
            exp_avgs=[state["exp_avg"] for state in states],
            exp_avg_sqs=[state["exp_avg_sq"] for state in states],
            steps=[state["step"] for state in states],
        )
        settings = self.settings
        adamw_update(
            tensors, AdamWSettings(rate, settings.adamw_betas, settings.adamw_eps, settings.adamw_weight_decay), None
        )
