"""What ``MuonAdamW`` knows of a model, and what it refuses: a model that changed, gradients that do not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_runtime.errors import GradientMismatch, ParametersChanged, SelectionError, SettingError, UnsupportedFeature

__all__ = ["Entry", "Manifest", "check_gradients", "check_rate", "check_unchanged", "make_manifest", "read_model"]

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Entry:
    """One parameter: all its names, shape, dtype, whether it trains and whether Muon trains it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trains: bool
    selected: bool

    @property
    def name(self) -> str:
        """The first name, under which its state is saved."""
        return self.names[0]


Manifest = tuple[Entry, ...]


def read_model(model: nn.Module, selected: frozenset[int]) -> tuple[Manifest, dict[str, nn.Parameter]]:
    """Return the manifest in the model's order, and its parameters by first name; ``selected`` holds ids."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    manifest = tuple(
        Entry(tuple(names[key]), tuple(p.shape), str(p.dtype), p.requires_grad, key in selected)
        for key, p in parameters.items()
    )
    return manifest, {names[key][0]: p for key, p in parameters.items()}


def make_manifest(
    model: nn.Module, selection: Sequence[str | nn.Parameter]
) -> tuple[Manifest, dict[str, nn.Parameter]]:
    """Resolve an explicit selection.

    Raises:
        SelectionError: empty, or with every duplicate, unknown, frozen, non-floating or non-matrix member.
        UnsupportedFeature: a parameter of the model is sharded.
    """
    if not selection:
        raise SelectionError("no parameter was selected for Muon; name at least one, or use AdamW alone")
    by_name = dict(model.named_parameters(remove_duplicate=False))
    named = {id(parameter): name for name, parameter in reversed(by_name.items())}
    mistakes: list[str] = []
    chosen: set[int] = set()
    for position, member in enumerate(selection):
        parameter = by_name.get(member) if isinstance(member, str) else member
        if not isinstance(parameter, nn.Parameter) or id(parameter) not in named:
            shown = repr(member) if isinstance(member, str) else f"the tensor of shape {_shape(member)}"
            mistakes.append(f"[{position}] {shown} is no parameter of the model")
            continue
        name = named[id(parameter)]
        if id(parameter) in chosen:
            mistakes.append(f"[{position}] {name} is selected twice")
        elif reason := _why_no_matrix(parameter):
            mistakes.append(f"[{position}] {name} {reason}")
        chosen.add(id(parameter))
    mistakes += [
        f"{name} has dtype {parameter.dtype}; AdamW here takes real floating ones"
        for name, parameter in by_name.items()
        if parameter.requires_grad and id(parameter) not in chosen and not parameter.dtype.is_floating_point
    ]
    if mistakes:
        raise SelectionError("the selection for Muon is invalid: " + "; ".join(mistakes), mistakes)
    _refuse_sharded(by_name, "parameters")
    return read_model(model, frozenset(chosen))


def _shape(value: object) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _why_no_matrix(parameter: nn.Parameter) -> str | None:
    if not parameter.requires_grad:
        return "is frozen; unfreeze it first, or leave it out"
    if not parameter.dtype.is_floating_point:
        return f"has dtype {parameter.dtype}; Newton-Schulz takes real floating ones"
    if parameter.ndim != 2 or min(parameter.shape) < 2:
        return f"has shape {tuple(parameter.shape)}, which is no matrix of two dims above 1; leave it to AdamW"
    return None


def _refuse_sharded(tensors: Mapping[str, Tensor], what: str) -> None:
    sharded = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
    if sharded:
        raise UnsupportedFeature(
            f"sharded {what}: {', '.join(sharded)}. Orthogonalising shards apart is not orthogonalising the matrix; "
            "use dmuon.Muon with dedicate_params, or build_optimizers",
            sharded,
        )


def check_rate(name: str, rate: object) -> float:
    """Return ``rate`` as a number; raises :class:`SettingError` unless it is finite, not negative and below 3.5e38."""
    value = float(rate) if isinstance(rate, (int, float, Tensor)) and not isinstance(rate, bool) else math.nan
    if not 0.0 <= value <= _LARGEST:
        raise SettingError(f"{name} must be a finite number of at least 0 that float32 can hold, not {rate!r}")
    return value


def check_unchanged(expected: Manifest, kept: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Raise :class:`ParametersChanged` with every parameter that was added, removed, replaced or altered."""
    selected = frozenset(id(kept[entry.name]) for entry in expected if entry.selected)
    manifest, parameters = read_model(model, selected)
    _refuse_sharded(parameters, "parameters")
    before, now = ({entry.name: entry for entry in each} for each in (expected, manifest))
    changed = [f"{name} is gone" for name in before.keys() - now.keys()]
    changed += [f"{name} is new" for name in now.keys() - before.keys()]
    for name in before.keys() & now.keys():
        if parameters[name] is not kept[name]:
            changed.append(f"{name} is another tensor")
        elif before[name] != now[name]:
            changed.append(f"{name} was {_told(before[name])}, is {_told(now[name])}")
    if changed:
        raise ParametersChanged(
            f"the model is not the one that was selected from: {'; '.join(sorted(changed))}. Nothing was updated; make "
            "a new MuonAdamW",
            sorted(changed),
        )


def _told(entry: Entry) -> str:
    return f"{list(entry.shape)} {entry.dtype} {'training' if entry.trains else 'frozen'} {' = '.join(entry.names)}"


def check_gradients(kept: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    """Check metadata only; no value is read.

    Args:
        kept: trainable and frozen parameters by first name.
        gradients: by name; a name may be missing.

    Raises:
        UnsupportedFeature: a gradient is sharded.
        GradientMismatch: with every gradient that belongs to no trainable parameter, is sparse, or has another shape,
            dtype or device than its parameter.
    """
    _refuse_sharded(gradients, "gradients")
    mistakes: list[str] = []
    for name, gradient in gradients.items():
        parameter = kept.get(name)
        if parameter is None or not parameter.requires_grad:
            state = "of no parameter of the model" if parameter is None else "of a frozen parameter"
            mistakes.append(f"{name}: a gradient {state}")
            continue
        if gradient.layout != torch.strided:
            mistakes.append(f"{name}: gradient has layout {gradient.layout}, expected {torch.strided}")
        for what in ("shape", "dtype", "device"):
            found, expected = getattr(gradient, what), getattr(parameter, what)
            if found != expected:
                mistakes.append(f"{name}: gradient has {what} {found}, the parameter {expected}")
    if mistakes:
        raise GradientMismatch("nothing was updated: " + "; ".join(mistakes), mistakes)
