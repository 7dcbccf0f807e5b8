"""``build_optimizers``: the optimizers of a plain run, to be stepped in tandem."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import nn

from dmuon_runtime.baselines.split import DEFAULT_ADAMW_HINTS, RoutedParameter, route_parameters
from dmuon_runtime.baselines.whole_matrix import WholeMatrixMuon
from dmuon_runtime.errors import NothingMatched, SettingError

__all__ = ["BaselineConfig", "BaselineSettings", "build_optimizers"]

_LOG = logging.getLogger("dmuon_runtime")
_NO_DECAY_MAX_DIMS = 1
Groups = list[dict[str, object]]


class BaselineSettings(Protocol):
    """What :func:`build_optimizers` reads of a configuration, always.

    Optional attributes, read where they exist: ``betas``, ``eps``, ``muon_nesterov``, ``adamw_name_hints``.
    """

    @property
    def optimizer(self) -> str:
        """``adamw`` or ``muon``."""
        ...

    @property
    def lr(self) -> float:
        """Rate of AdamW."""
        ...

    @property
    def weight_decay(self) -> float:
        """Decay of AdamW."""
        ...

    @property
    def weight_decay_exclude_1d(self) -> bool:
        """True leaves parameters of at most one dim without decay."""
        ...


@dataclass(frozen=True)
class BaselineConfig:
    """Settings of a baseline. Any object with these attributes serves; those of Muon are read for ``muon`` alone."""

    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.01
    weight_decay_exclude_1d: bool = False
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.0
    muon_ns_steps: int = 5
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = "match_rms_adamw"
    muon_nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adamw_name_hints: tuple[str, ...] = DEFAULT_ADAMW_HINTS


def build_optimizers(model: nn.Module, config: BaselineSettings) -> list[torch.optim.Optimizer]:
    """Return ``[AdamW]`` for ``adamw`` and ``[Muon, AdamW]`` for ``muon``; an optimizer without parameters is left out.

    Muon takes the matrices (:func:`route_parameters`), AdamW the rest. Groups carry ``name`` (``muon``, ``base`` and
    ``base_no_decay``) and ``param_names``. Parameters may be plain tensors or FSDP2's DTensors.

    Raises:
        AttributeError: ``config`` lacks a setting that is needed; none is guessed.
        SettingError: ``config.optimizer`` is neither.
        NothingMatched: the model has no trainable parameter.
    """
    exclude_1d = bool(config.weight_decay_exclude_1d)
    if config.optimizer not in ("adamw", "muon"):
        raise SettingError(f"Unsupported optimizer: {config.optimizer!r}; there are 'adamw' and 'muon'")
    kind = cast('Literal["adamw", "muon"]', config.optimizer)
    hints = cast("Sequence[str]", getattr(config, "adamw_name_hints", DEFAULT_ADAMW_HINTS))
    routed = route_parameters(model, kind, hints)
    if not routed:
        raise NothingMatched("No trainable parameters found to optimize; unfreeze some with requires_grad_(True)")
    matrices = [entry for entry in routed if entry.route == "muon"]
    others = [entry for entry in routed if entry.route == "adamw"]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(_muon(matrices, config))
    if others:
        optimizers.append(_adamw(others, config, exclude_1d))
    return optimizers


def _muon(entries: Sequence[RoutedParameter], config: BaselineSettings) -> WholeMatrixMuon:
    settings = cast(BaselineConfig, config)
    _LOG.info("baseline: Muon trains %d matrices", len(entries))
    return WholeMatrixMuon(
        [_group("muon", entries)],
        lr=settings.muon_lr,
        momentum=settings.muon_momentum,
        weight_decay=settings.muon_weight_decay,
        nesterov=bool(getattr(config, "muon_nesterov", True)),
        ns_steps=settings.muon_ns_steps,
        adjust_lr_fn=settings.muon_adjust_lr_fn,
    )


def _adamw(entries: Sequence[RoutedParameter], config: BaselineSettings, exclude_1d: bool) -> torch.optim.AdamW:
    groups = [_group("base", entries)]
    if exclude_1d:
        decayed = [entry for entry in entries if entry.parameter.ndim > _NO_DECAY_MAX_DIMS]
        kept = [entry for entry in entries if entry.parameter.ndim <= _NO_DECAY_MAX_DIMS]
        groups = [_group("base", decayed)] if decayed else []
        groups += [_group("base_no_decay", kept) | {"weight_decay": 0.0}] if kept else []
    _LOG.info("baseline: AdamW trains %d parameters in %d groups", len(entries), len(groups))
    betas = cast("tuple[float, float]", getattr(config, "betas", (0.9, 0.999)))
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=betas, eps=float(getattr(config, "eps", 1e-8)), weight_decay=config.weight_decay
    )


def _group(name: str, entries: Sequence[RoutedParameter]) -> dict[str, object]:
    return {"params": [(entry.name, entry.parameter) for entry in entries], "name": name}
