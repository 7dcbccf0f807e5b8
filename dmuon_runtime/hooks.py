"""Hooks on boundary modules: they tell the schedule what this rank needs now, and nothing else.

Pre-forward materialises, post-forward frees (Z3) and puts a hook on every output tensor that carries a gradient,
however nested; that hook materialises before the module's backward. A hook on each parameter tells when autograd has
finished its gradient. The first of these in a backward opens the half, and a callback of the engine closes it. When a
boundary module is compiled, its hooks stay outside of the graphs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from dmuon_runtime.errors import UnsupportedFeature
from dmuon_runtime.policy import DTYPE_NAMES
from dmuon_runtime.schedule import Schedule, Stage
from dmuon_runtime.trees import cast_floating, iterate_tensors, map_tensors
from dmuon_runtime.unit import Unit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackwardWatch", "install_hooks"]


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1


class BackwardWatch:
    """Opens a half at the first event of a backward and closes it when the outermost backward ends."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._is_open = False

    def note_event(self) -> None:
        """Call inside a backward, before anything else."""
        if not self._is_open:
            self.schedule.begin_half()
            self._is_open = True
            Variable._execution_engine.queue_callback(self._end)

    def note_outside(self) -> None:
        """Call outside any backward: one that is still open has failed and its callback never came."""
        self._is_open = False

    def _end(self) -> None:
        self._is_open = False
        self.schedule.end_half()


class _UnitHooks:
    """The hooks of one unit."""

    def __init__(self, unit: Unit, watch: BackwardWatch) -> None:
        self.unit = unit
        self.watch = watch
        self.schedule = watch.schedule
        self._input_dtype = DTYPE_NAMES[unit.plan.cast_inputs_to] if unit.plan.cast_inputs_to else None
        self._output_dtype = DTYPE_NAMES[unit.plan.output_dtype] if unit.plan.output_dtype else None

    def before_forward(
        self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Materialise, and cast the inputs if the policy says so."""
        if _in_backward():
            self.watch.note_event()
            self.unit.begin_replay()
            self.schedule.need_backward(self.unit)
        else:
            self.watch.note_outside()
            self.schedule.need_forward(self.unit)
            self.unit.begin_call(with_gradients=torch.is_grad_enabled())
        if self._input_dtype is None:
            return None
        return cast_floating(args, self._input_dtype), cast_floating(kwargs, self._input_dtype)

    def after_forward(self, _module: nn.Module, _args: tuple[object, ...], output: object) -> object:
        """Free, watch the outputs' gradients, and cast the outputs if the policy says so."""
        output = self._without_weights(output)
        if not _in_backward():
            self.schedule.after_forward(self.unit)
        if torch.is_grad_enabled():
            for tensor in iterate_tensors(output):
                if tensor.grad_fn is not None:  # a leaf was only passed through, and would keep the hook for good
                    tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
        return output if self._output_dtype is None else cast_floating(output, self._output_dtype)

    def _without_weights(self, output: object) -> object:
        """Copy what the module returns of its weights, such as the first rows of a table: their memory is given back.

        Raises :class:`UnsupportedFeature` for a weight inside an object whose parts cannot be exchanged.
        """
        if not any(self.unit.holds(tensor) for tensor in iterate_tensors(output)):
            return output
        output = map_tensors(output, lambda tensor: tensor.clone() if self.unit.holds(tensor) else tensor)
        if any(self.unit.holds(tensor) for tensor in iterate_tensors(output)):
            raise UnsupportedFeature(
                f"{self.unit.plan.name or 'the model'} returns a weight of its own inside {type(output).__name__}; its "
                "memory is given back after the forward: return a copy (.clone()), or in a tuple, list, dict or "
                "dataclass",
                [self.unit.plan.name],
            )
        return output

    def _before_backward(self, _gradient: Tensor) -> None:
        """Materialise; a tensor that was only passed through may get its gradient after the unit is done."""
        self.watch.note_event()
        if not (self.unit.was_called and self.unit.is_done):
            self.schedule.need_backward(self.unit)

    def gradient_hook(self) -> Callable[[Tensor], None]:
        """Return the hook for each of the unit's parameters.

        It does not keep the unit alive: the collector does not see what a tensor's hooks refer to. The module's do.
        """
        reference = weakref.ref(self)

        def note(parameter: Tensor) -> None:
            hooks = reference()
            if hooks is not None:
                hooks.watch.note_event()
                assert isinstance(parameter, nn.Parameter)
                hooks.unit.note_gradient(parameter)
                hooks.schedule.gradient_ready(hooks.unit)

        return note


def install_hooks(schedule: Schedule) -> BackwardWatch:
    """Put the hooks of every unit in place; return what watches the backwards."""
    watch = BackwardWatch(schedule)
    for unit in schedule.units:
        hooks = _UnitHooks(unit, watch)
        eager = torch.compiler.disable
        unit.module.register_forward_pre_hook(
            eager(hooks.before_forward),  # type: ignore[no-untyped-call]
            with_kwargs=True,
            prepend=True,
        )
        unit.module.register_forward_hook(eager(hooks.after_forward), always_call=True)  # type: ignore[no-untyped-call]
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(hooks.gradient_hook())  # type: ignore[no-untyped-call]
    assert schedule.stage is Stage.IDLE
    return watch
