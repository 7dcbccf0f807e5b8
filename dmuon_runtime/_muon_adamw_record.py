"""The record of a ``MuonAdamW``: versioned, bound to one configuration and one manifest, lossless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon_runtime._muon_adamw_manifest import Entry, Manifest
from dmuon_runtime.errors import StateMismatch

__all__ = ["RECORD_VERSION", "AdamWState", "MuonAdamWRecord", "check_record"]

RECORD_VERSION = 1


@dataclass(frozen=True)
class AdamWState:
    """State of one parameter: a 0-dim count of its steps, and two moments in its shape and dtype."""

    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class MuonAdamWRecord:
    """Copies of all state. Parameters that never had a gradient have none."""

    version: int
    config_key: str
    """The settings that give the state its meaning, the momentum convention among them; not the rates."""
    manifest: Manifest
    rates: dict[str, dict[str, float]]
    """``lr`` (and ``initial_lr`` of a scheduler) by group."""
    muon: dict[str, Tensor]
    """Momentum by parameter name."""
    adamw: dict[str, AdamWState]

    @property
    def muon_state_count(self) -> int:
        """Number of momentum buffers."""
        return len(self.muon)

    @property
    def adamw_state_count(self) -> int:
        """Number of parameters with AdamW state."""
        return len(self.adamw)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain containers and tensors, which ``torch.load(weights_only=True)`` reads."""
        return {
            "version": self.version,
            "config_key": self.config_key,
            "manifest": [asdict(entry) for entry in self.manifest],
            "rates": {name: dict(rates) for name, rates in self.rates.items()},
            "muon": dict(self.muon),
            "adamw": {name: dict(vars(state)) for name, state in self.adamw.items()},
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> MuonAdamWRecord:
        """Inverse of :meth:`to_dict`; raises :class:`StateMismatch` when ``document`` is no record of this version."""
        version = document.get("version")
        if version != RECORD_VERSION:
            raise StateMismatch(
                f"a MuonAdamW record has version {RECORD_VERSION}, found {version!r}; state dicts of other optimizers "
                "are keyed by position and cannot be taken over"
            )
        try:
            return cls(
                version=RECORD_VERSION,
                config_key=str(document["config_key"]),
                manifest=tuple(_entry(each) for each in document["manifest"]),
                rates={str(n): {str(k): float(v) for k, v in r.items()} for n, r in document["rates"].items()},
                muon=dict(document["muon"]),
                adamw={name: AdamWState(**state) for name, state in document["adamw"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StateMismatch(f"the MuonAdamW record is damaged, nothing was loaded: {error!r}") from error


def _entry(document: Mapping[str, Any]) -> Entry:
    fields = dict(document)
    return Entry(**fields | {"names": tuple(fields["names"]), "shape": tuple(fields["shape"])})


def check_record(record: MuonAdamWRecord, config_key: str, manifest: Manifest) -> None:
    """Raise :class:`StateMismatch`, with everything that does not fit, unless the record can be loaded whole."""
    mistakes: list[str] = []
    if record.version != RECORD_VERSION:
        mistakes.append(f"version {record.version}, expected {RECORD_VERSION}")
    if record.config_key != config_key:
        mistakes.append(f"configuration {record.config_key}, this optimizer has {config_key}")
    mistakes += _manifest_mistakes(record.manifest, manifest)
    entries = {entry.name: entry for entry in manifest}
    for name, buffer in record.muon.items():
        mistakes += _state_mistakes(name, entries.get(name), True, {"momentum": buffer})
    for name, state in record.adamw.items():
        moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        mistakes += _state_mistakes(name, entries.get(name), False, moments)
        step = float(state.step) if isinstance(state.step, Tensor) and state.step.ndim == 0 else float("nan")
        if not (step >= 1 and step == int(step)):
            mistakes.append(f"{name}: step count {state.step!r}, expected a whole number of at least 1")
    groups = {"muon", "adamw"} if any(entry.trains and not entry.selected for entry in manifest) else {"muon"}
    if set(record.rates) != groups or not all("lr" in rates for rates in record.rates.values()):
        mistakes.append(f"rates of the groups {sorted(record.rates)}, expected lr of {sorted(groups)}")
    if mistakes:
        raise StateMismatch("the record does not fit, nothing was loaded: " + "; ".join(mistakes), mistakes)


def _manifest_mistakes(found: Manifest, expected: Manifest) -> list[str]:
    theirs, ours = {entry.name: entry for entry in found}, {entry.name: entry for entry in expected}
    mistakes = [f"{name} is not in the model" for name in theirs.keys() - ours.keys()]
    mistakes += [f"{name} is not in the record" for name in ours.keys() - theirs.keys()]
    for name in theirs.keys() & ours.keys():
        differing = [
            f"{key} {value!r}, expected {getattr(ours[name], key)!r}"
            for key, value in vars(theirs[name]).items()
            if value != getattr(ours[name], key)
        ]
        mistakes += [f"{name}: {text}" for text in differing]
    return sorted(mistakes)


def _state_mistakes(name: str, entry: Entry | None, muon: bool, tensors: Mapping[str, object]) -> list[str]:
    if entry is None or not entry.trains or entry.selected != muon:
        return [f"{name} has state of {'Muon' if muon else 'AdamW'}, which does not train it"]
    mistakes = []
    for key, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            mistakes.append(f"{name}: {key} is no tensor")
        elif (tuple(tensor.shape), str(tensor.dtype)) != (entry.shape, entry.dtype):
            mistakes.append(
                f"{name}: {key} is {list(tensor.shape)} {tensor.dtype}, expected {list(entry.shape)} {entry.dtype}"
            )
    return mistakes
