"""The routing section of a spec, as the arguments that the runtime takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from worker.contract.errors import FieldError, PlanRefused
from worker.contract.spec import JobSpec

__all__ = ["hook_boundaries", "is_managed", "param_policy"]


def is_managed(name: str, parameter: nn.Parameter) -> bool:
    """Pure mode: the runtime manages every trainable parameter."""
    return parameter.requires_grad


def param_policy(spec: JobSpec) -> Mapping[str, Any]:
    """Return ``param_policy`` of the runtime.

    With ``training.precision: bfloat16`` parameters are used in bfloat16 and gradients reduced in float32, unless the
    routing section says otherwise.
    """
    defaults: dict[str, Any] = {"route": "muon"}
    if spec.training.precision == "bfloat16":
        defaults |= {"param_dtype": "bfloat16", "grad_dtype": "float32"}
    return {
        "defaults": defaults | spec.routing.defaults.model_dump(exclude_none=True),
        "overrides": [
            {"name": list(override.name), "set": override.set.model_dump(exclude_none=True)}
            for override in spec.routing.overrides
        ],
    }


def hook_boundaries(spec: JobSpec, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return which modules gather parameters; None leaves it to the runtime.

    A parameter outside of all named modules (an embedding, a head) is gathered at its own module.

    Raises:
        PlanRefused: a name that is neither a module nor the class of one.
    """
    names = spec.routing.hook_boundaries
    if not names:
        return None
    by_token: dict[str, set[int]] = {token: set() for token in names}
    for module_name, module in model.named_modules():
        for token in (module_name, type(module).__name__):
            if token in by_token:
                by_token[token].add(id(module))
    errors = [
        FieldError(
            pointer=f"/routing/hook_boundaries/{index}",
            code="unknown_module",
            message=f"{token!r} is neither the name of a module nor a class of one",
            suggestion="Classes here: " + ", ".join(sorted({type(module).__name__ for module in model.modules()})),
        )
        for index, token in enumerate(names)
        if not by_token[token]
    ]
    if errors:
        raise PlanRefused(errors)
    chosen = set().union(*by_token.values())
    return lambda module: id(module) in chosen
