"""Who trains in a model: seen once when the optimizer is built, and looked at again before each step.

A parameter that is unfrozen, replaced or added later has a gradient and nobody who updates it. The look compares
identities of modules and parameters on the host, about 0.3 us for each module; only a difference costs a walk.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from dmuon_runtime.errors import UnmanagedParameters

__all__ = ["Roster"]


class Roster:
    """The modules of ``model`` and the parameters that train in it, all of which have somebody who updates them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._known_modules = {id(module) for module in self._modules}
        self._known = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
        # FSDP2 exchanges the parameter objects of what it shards at each use
        self._own = [
            module
            for module in self._modules
            if not any(isinstance(parameter, DTensor) for parameter in module._parameters.values())
        ]

    def check(self) -> None:
        """Raise :class:`UnmanagedParameters` that names what trains now and did not then; no communication."""
        if self._has_changed():
            late = [
                name
                for module_name, module in self._model.named_modules()
                if module in self._own or id(module) not in self._known_modules
                for name, parameter in module.named_parameters(prefix=module_name, recurse=False)
                if self._is_late(parameter)
            ]
            if late:
                raise UnmanagedParameters(
                    f"nobody would update {', '.join(late)}: unfrozen, replaced or added after the optimizer was "
                    "built. Do that before dedicate_params, or freeze them with requires_grad_(False)",
                    late,
                )

    def _has_changed(self) -> bool:
        return any(
            id(child) not in self._known_modules
            for module in self._modules
            for child in module._modules.values()
            if child is not None
        ) or any(
            self._is_late(parameter)
            for module in self._own
            for parameter in module._parameters.values()
            if parameter is not None
        )

    def _is_late(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._known and parameter.requires_grad and parameter.numel() > 0
