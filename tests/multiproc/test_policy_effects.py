"""Each field of a policy by what it does on two ranks: dtypes on the wire, of state, of inputs and of outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon_runtime as dmuon
from dmuon_runtime.process_groups import Axis
from dmuon_runtime.runtime import find_runtime
from dmuon_runtime.transport import Handle
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Setting, bfloat16_law, world_mesh
from tests.multiproc.models import POLICY, batch, lm_loss, make

pytestmark = pytest.mark.multiproc

ROUTES: list[dict[str, object]] = POLICY["overrides"]  # type: ignore[assignment]
BF16, FP32 = torch.bfloat16, torch.float32


class Observed:
    """A small model under ``defaults`` and ``overrides`` after one training step, and what it did."""

    def __init__(self, defaults: dict[str, object], *overrides: dict[str, object], dtype: torch.dtype = FP32) -> None:
        self.model = make(dtype=dtype)
        policy = {"defaults": defaults, "overrides": [*ROUTES, *overrides]}
        dmuon.dedicate_params(self.model, world_mesh(), lambda name, p: p.requires_grad, param_policy=policy)
        self.optimizer = dmuon.Muon(self.model)
        self.wire: dict[str, set[torch.dtype]] = {}
        """dtypes of payloads by phase."""
        self.seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """dtypes of the input and output of a module, as its parent sees the output."""
        self._watch_wire()
        for name in ("layers.0", "layers.0.up", "lm_head"):
            self.model.get_submodule(name).register_forward_hook(self._watch_module(name))
        self.logits = self.model(batch(0, dist.get_rank()))
        self.logits.float().square().mean().backward()
        self.optimizer.step()

    def _watch_wire(self) -> None:
        transport = find_runtime(self.model).transport
        issue = transport._issue

        def watched(
            work: Callable[[], object], axis: Axis, lane: str, key: tuple[str, str] | None, keep: tuple[Tensor, ...]
        ) -> Handle:
            if key is not None and axis.size > 1:
                self.wire.setdefault(key[1], set()).add(keep[0].dtype)
            return issue(work, axis, lane, key, keep)  # type: ignore[arg-type]

        transport._issue = watched  # type: ignore[assignment, method-assign]

    def _watch_module(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def note(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.seen[name] = (args[0].dtype, output.dtype)

        return note

    def state_dtypes(self) -> set[torch.dtype]:
        """Return dtypes of momentum and moments on this rank."""
        states = [self.optimizer.state[piece.parameter] for piece in self.optimizer.pieces]
        return {value.dtype for state in states for key, value in state.items() if key != "step"}

    def master_dtypes(self) -> set[torch.dtype]:
        """Return dtypes of the masters on this rank."""
        return {piece.master.dtype for piece in self.optimizer.pieces}

    def payload(self, phase: str) -> int:
        """Return counted payload bytes of a phase."""
        counted = dmuon.get_counters(self.model).snapshot().comm
        return sum(item.payload_bytes for (_, where), item in counted.items() if where == phase)


def _wire_and_state() -> None:
    plain = Observed({})
    assert plain.wire == {"forward": {FP32}, "backward": {FP32}, "reduce": {FP32}}
    assert plain.state_dtypes() == plain.master_dtypes() == {FP32}
    half = Observed({"param_dtype": "bf16"})
    assert half.wire == {"forward": {BF16}, "backward": {BF16}, "reduce": {BF16}}
    assert half.payload("forward") <= 0.55 * plain.payload("forward"), "half the bytes, but for alignment"
    assert half.state_dtypes() == half.master_dtypes() == {FP32}, "momentum does not follow the gradient's dtype"
    wide = Observed({"param_dtype": "bf16", "grad_dtype": "fp32"})
    assert wide.wire == {"forward": {BF16}, "backward": {BF16}, "reduce": {FP32}}
    assert wide.payload("reduce") == 2 * half.payload("reduce")
    narrow = Observed({"grad_dtype": torch.float16})
    assert narrow.wire == {"forward": {FP32}, "backward": {FP32}, "reduce": {torch.float16}}
    optim = Observed({"optim_dtype": "bf16"})
    assert (optim.state_dtypes(), optim.master_dtypes()) == ({BF16}, {FP32})
    own = Observed({"master_dtype": None, "optim_dtype": None}, dtype=BF16)
    assert own.state_dtypes() == own.master_dtypes() == {BF16}, "None keeps the model's own"
    assert own.wire["forward"] == {BF16}
    kept = Observed({}, dtype=BF16)
    assert kept.master_dtypes() == {FP32} and kept.wire["forward"] == {BF16}, "bf16 model, fp32 masters by default"
    mixed = Observed({"param_dtype": "bf16"}, {"name": "lm_head", "set": {"param_dtype": "fp32"}}, _casts("lm_head"))
    assert mixed.wire["forward"] == {BF16, FP32}
    assert {p.dtype for p in mixed.model.lm_head.parameters()} == {FP32}
    assert {p.dtype for p in mixed.model.layers.parameters()} == {BF16}


def _casts(name: str) -> dict[str, object]:
    return {"name": name, "set": {"cast_forward_inputs": True}}


def _activations() -> None:
    half = Observed({"param_dtype": "bf16"})
    assert half.seen["layers.0"] == half.seen["lm_head"] == (BF16, BF16)
    outputs = Observed({"param_dtype": "bf16"}, {"name": "lm_head", "set": {"output_dtype": "fp32"}})
    assert outputs.seen["lm_head"] == (BF16, FP32)
    assert outputs.logits.dtype is FP32 and half.logits.dtype is BF16
    island: dict[str, object] = {"param_dtype": "bf16", "cast_forward_inputs": True, "output_dtype": "fp32"}
    blocks = Observed({}, {"name": "layers.0.", "set": island})
    assert blocks.seen["layers.0.up"] == (BF16, BF16), "the block computes in its own dtype"
    assert blocks.seen["layers.0"] == (BF16, FP32)
    assert blocks.logits.dtype is FP32
    with pytest.raises(RuntimeError, match="dtype"):
        Observed({}, {"name": "layers.0.", "set": {"param_dtype": "bf16"}})  # inputs are cast only where it is asked


def _set_up_refusals() -> None:
    with pytest.raises(dmuon.DtypeConflict, match=r"layers\.0 casts its inputs.*bfloat16.*float32"):
        Observed({"cast_forward_inputs": True}, {"name": "layers.0.up", "set": {"param_dtype": "bf16"}})
    with pytest.raises(dmuon.DtypeConflict, match=r"layers\.0 has mixed output_dtype"):
        Observed(
            {},
            {"name": "layers.0.up", "set": {"output_dtype": "bf16"}},
            {"name": "layers.0.down", "set": {"output_dtype": "fp16"}},
        )
    one = {"overrides": [*ROUTES, {"name": "layers.0.up", "set": {"output_dtype": "bf16"}}]}
    units = dmuon.plan_params(make(), 2, lambda name, p: True, param_policy=one).units
    assert {unit.name: unit.output_dtype for unit in units}["layers.0"] == "bfloat16", "one member is enough to say it"


def _hint_and_boundaries() -> None:
    def hint(name: str, parameter: nn.Parameter) -> str | None:
        if "embed" in name or "lm_head" in name:
            return "base_sharded"
        return "base" if parameter.ndim < 2 else None

    model = make()
    dmuon.dedicate_params(model, world_mesh(), lambda name, p: p.requires_grad, route_hint_fn=hint)
    routes = {entry.name: (entry.route, entry.rule) for entry in dmuon.get_plan(model).parameters}
    assert routes["embed.weight"] == ("sharded_adamw", "route_hint_fn")
    assert routes["layers.0.norm.weight"] == ("adamw", "route_hint_fn")
    assert routes["layers.0.up.weight"] == ("muon", "defaults")
    lm_loss(model, batch(0, dist.get_rank())).backward()
    with pytest.raises(dmuon.PolicyError, match="both set routes"):
        dmuon.plan_params(make(), 2, lambda name, p: True, route_hint_fn=hint, param_policy=POLICY)


def _traffic_is_planned() -> None:
    """Gradients twice as wide as weights: each phase has its own bytes, counted as they were planned."""
    seen = Observed({"param_dtype": "bf16", "grad_dtype": "fp32"})
    plan = dmuon.get_plan(seen.model).rank_traffic[dist.get_rank()]
    counted = dmuon.get_counters(seen.model).snapshot().comm
    assert {key: item.payload_bytes for key, item in counted.items()} == {
        key: item.payload_bytes for key, item in plan.items()
    }
    assert seen.payload("reduce") == 2 * seen.payload("forward")


def _narrow_sums() -> None:
    """Two gradients of 40 000 have a sum that float16 cannot hold, and a mean that it can."""
    model = nn.Linear(4, 4, bias=False)
    dmuon.dedicate_params(model, world_mesh(), lambda *_: True, param_policy={"defaults": {"grad_dtype": "fp16"}})
    optimizer = dmuon.Muon(model)
    (model(torch.eye(4)).sum() * 40_000).backward()
    assert float(dmuon.clip_grad_norm_(optimizer, 1e9)) == pytest.approx(160_000, rel=1e-3)
    optimizer.step()
    assert optimizer.last_step is not None and not optimizer.last_step.skipped


def _every_law() -> None:
    _traffic_is_planned()
    _narrow_sums()
    _wire_and_state()
    _activations()
    _set_up_refusals()
    _hint_and_boundaries()
    for setting in (Setting(), Setting(reshard=False), Setting(replicas=2), Setting(storage="replicated")):
        bfloat16_law(setting)


def test_each_field_does_what_it_says() -> None:
    """``param_dtype``, ``grad_dtype``, ``master_dtype``, ``optim_dtype``, casts, conflicts, routes, bfloat16 losses."""
    run_ranks(2, _every_law)


def _boundary_units(**options: object) -> list[str]:
    plan = dmuon.plan_params(make(), 2, lambda name, p: True, param_policy=POLICY, **options)  # type: ignore[arg-type]
    return [unit.name for unit in plan.units]


def test_boundaries() -> None:
    """Default, predicate with its lowest ancestor, and what is left when it holds nowhere."""
    assert _boundary_units() == ["embed", "layers.0", "layers.1", "layers.2", "norm", "lm_head"]
    assert _boundary_units(hook_boundary_predicate=lambda m: type(m).__name__ == "ToyLM") == [""]

    def linears(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    with pytest.raises(dmuon.BoundaryError) as found:
        _boundary_units(hook_boundary_predicate=linears)
    assert set(found.value.names) >= {"embed.weight", "layers.0.gain", "norm.bias"}
    lenient = _boundary_units(hook_boundary_predicate=linears, hook_boundary_strict=False)
    assert {"embed", "layers.0", "layers.0.norm", "layers.0.up", "norm"} <= set(lenient), "the direct parent"
