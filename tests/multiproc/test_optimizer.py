"""Groups, schedules, rates however given, closures, scales, steps and decay, on two ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

import dmuon_runtime as dmuon
from dmuon_runtime.matrix_updates import Scale, update_scale
from dmuon_runtime.runtime import find_runtime
from tests.multiproc.harness import run_ranks
from tests.multiproc.laws import Run, Setting, dedicate, hold_to_reference
from tests.multiproc.models import batch, lm_loss, make
from tests.multiproc.reference import PolarNewtonSchulz

pytestmark = pytest.mark.multiproc

Named = dict[str, nn.Parameter]


def _backward(model: nn.Module, step: int, rank: int) -> None:
    lm_loss(model, batch(step, rank)).backward()


def _fresh(**options: object) -> tuple[nn.Module, dmuon.Muon]:
    """Return a new dedicated model and an optimizer over it, with the stand-in Newton-Schulz."""
    model = dedicate(make(), Setting()).model
    options.setdefault("ns_backend", PolarNewtonSchulz())
    return model, dmuon.Muon(model, **options)  # type: ignore[arg-type]


def _masters(optimizer: dmuon.Muon) -> dict[str, Tensor]:
    return {piece.plan.name: piece.master.clone() for piece in optimizer.pieces}


Adjust = Callable[[dmuon.Muon, int], None]


def _train(options: dict[str, object], adjust: Callable[[dmuon.Muon], Adjust], steps: int = 4) -> dict[str, Tensor]:
    """Train with ``adjust(optimizer)`` called after each step; return this rank's masters."""
    model, optimizer = _fresh(**options)
    after = adjust(optimizer)
    for step in range(steps):
        _backward(model, step, dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()
        after(optimizer, step)
    return _masters(optimizer)


BASES = {"muon": 2e-2, "adamw": 1e-3, "sharded_adamw": 1e-3}


def _by_hand(as_given: Callable[[float], object]) -> Callable[[dmuon.Muon], Adjust]:
    """Assign ``base / (k + 1)`` after step k - 1, as what ``as_given`` makes of the number."""

    def start(optimizer: dmuon.Muon) -> Adjust:
        def adjust(optimizer: dmuon.Muon, step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = as_given(BASES[group["route"]] / (step + 2))

        return adjust

    return start


def _scheduled(optimizer: dmuon.Muon) -> Adjust:
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return lambda optimizer, step: schedule.step()


def _rates_are_what_was_set() -> None:
    expected = _train({}, _by_hand(float))
    constant = _train({}, lambda optimizer: lambda optimizer, step: None)
    assert any(not torch.allclose(expected[name], constant[name]) for name in expected)
    tensors: dict[str, object] = {
        "lr": torch.tensor(2e-2, dtype=torch.float64), "adamw_lr": torch.tensor(1e-3, dtype=torch.float64)
    }  # fmt: skip
    trials = [
        _train({}, _scheduled),
        _train(tensors, _scheduled),
        _train({}, _by_hand(lambda rate: torch.tensor(rate, dtype=torch.float64))),
        _train(tensors, _by_hand(float)),
    ]
    for found in trials:
        assert all(torch.allclose(found[name], value, rtol=1e-12, atol=0) for name, value in expected.items())


def _schedules_keep_the_ratio() -> None:
    """Warm-up and decay, cosine, a sequence, plateau: 20 to 1 at each step, whatever the type of the rate."""
    makers: list[Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4) * 0.9**step),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.25, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
        ),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ]
    for make_schedule in makers:
        for number in (float, lambda rate: torch.tensor(rate, dtype=torch.float64)):
            _, optimizer = _fresh(lr=number(2e-2), adamw_lr=number(1e-3))
            schedule = make_schedule(optimizer)
            seen = set()
            for _ in range(6):
                rates = {str(group["route"]): float(group["lr"]) for group in optimizer.param_groups}
                assert rates["muon"] == pytest.approx(20 * rates["adamw"], rel=1e-6)
                assert rates["sharded_adamw"] == pytest.approx(rates["adamw"], rel=1e-6)
                seen.add(rates["muon"])
                optimizer.step()
                if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                    schedule.step(1.0)
                else:
                    schedule.step()
            assert len(seen) >= 4, "the schedule really moves"


def test_rates() -> None:
    """Numbers or tensors, from a scheduler or by hand: the step uses the value that stands in the group."""
    run_ranks(2, _rates_are_what_was_set)
    run_ranks(2, _schedules_keep_the_ratio)


def _groups(named: Named, *special: str, **settings: object) -> list[dict[str, object]]:
    return [
        {"params": [named[name] for name in special], "name": "special", **settings},
        {"params": [p for name, p in named.items() if name not in special], "name": "rest"},
    ]


def _forced_routes() -> None:
    """A group moves its members to other maths: equal to a policy that had said so; placement stays as planned."""
    up = "layers.0.up.weight"

    def loop(run: Run, setting: Setting) -> None:
        named = dict(run.model.named_parameters())
        groups = _groups(named, up, "layers.1.down.weight", matrix_optimizer="base_optimizer", adamw_lr=1e-3)
        del run.optimizer
        optimizer = run.optimizer = dmuon.Muon(
            run.model, weight_decay=0.1, param_groups=groups, ns_backend=PolarNewtonSchulz()
        )
        assert [group["group_name"] for group in optimizer.param_groups] == [
            "special/adamw", "rest/muon", "rest/adamw", "rest/sharded_adamw"
        ]  # fmt: skip
        for step in range(setting.steps):
            _backward(run.model, step, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
        rows = {row["name"]: row for row in dmuon.summarize_param_groups(run.model, optimizer)["parameters"]}  # type: ignore[attr-defined]
        assert (rows[up]["route"], rows[up]["planned_route"], rows[up]["rule"]) == ("adamw", "muon", "param_groups")
        counted = dmuon.get_counters(run.model).snapshot()
        mine = [piece for piece in optimizer.pieces if piece.plan.route == "muon"]
        assert counted.ns_planned_matrices == setting.steps * len(mine), "what the groups say is what is planned"
        assert optimizer.last_step is not None

    moved = [up, "layers.1.down.weight"]
    override: dict[str, object] = {"name": moved, "set": {"route": "adamw"}}
    setting = Setting()
    policy = {**setting.policy, "overrides": [*setting.policy["overrides"], override]}  # type: ignore[misc]
    hold_to_reference(_backward, setting, loop=loop, routes=_routes(policy))


def _routes(policy: dict[str, object]) -> dict[str, str]:
    plan = dmuon.plan_params(make(), 2, lambda name, p: p.requires_grad, param_policy=policy)
    return {entry.name: entry.route for entry in plan.parameters}


def _impossible_routes() -> None:
    model = dedicate(make(), Setting()).model
    named = dict(model.named_parameters())
    mistakes = [
        (("embed.weight",), {"dmuon_route": "adamw"}, "moves embed.weight from sharded_adamw to adamw"),
        (("norm.bias",), {"dmuon_route": "sharded"}, "moves norm.bias from adamw to sharded_adamw"),
        (("norm.bias",), {"dmuon_optimizer": "muon"}, r"its shape \(12,\) is no plain matrix"),
        (("norm.bias",), {"dmuon_route": "sgd"}, "group 0: unknown route 'sgd'"),
        (("norm.bias",), {"momentums": 0.9}, "unknown keys"),
    ]  # fmt: skip
    for names, settings, message in mistakes:
        with pytest.raises(dmuon.ParamGroupError, match=message):
            dmuon.Muon(model, param_groups=_groups(named, *names, **settings))
    first_counts = _groups(named, "layers.0.up.weight", dmuon_route="adamw", matrix_optimizer="muon")
    optimizer = dmuon.Muon(model, param_groups=first_counts)
    assert optimizer.param_groups[0]["route"] == "adamw"
    del optimizer
    whole = dmuon.Muon(model, param_groups=_groups(named, "layers.0.up.weight", "norm.bias", lr=0.0))
    assert [g["group_name"] for g in whole.param_groups][:2] == ["special/muon", "special/adamw"], "split by route"
    assert [g["lr"] for g in whole.param_groups][:2] == [0.0, 0.0], "a rate of zero is a rate"


def test_semantic_groups() -> None:
    """Groups are split by route; a group may force muon or adamw on its members, but not move shards."""
    run_ranks(2, _forced_routes)
    run_ranks(2, _impossible_routes)


class _CountingNewtonSchulz(dmuon.NewtonSchulz):
    """Remembers the steps it was asked for."""

    def __init__(self) -> None:
        super().__init__(kernel="cublas")
        self.asked: set[int] = set()

    def each_round(
        self, like: Sequence[Tensor], load: Callable[[Sequence[int]], list[Tensor]], steps: int = 5
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Note the steps, then do them."""
        self.asked.add(steps)
        return super().each_round(like, load, steps)


def _change(options: dict[str, object], decay: float = 0.0) -> dict[str, Tensor]:
    """Return the change of this rank's masters in the first step, with one gradient for all ranks."""
    model, optimizer = _fresh(weight_decay=decay, adamw_weight_decay=decay, **options)
    before = _masters(optimizer)
    _backward(model, 0, 0)
    optimizer.step()
    return {name: value - before[name] for name, value in _masters(optimizer).items()}


def _maths() -> None:
    counting = _CountingNewtonSchulz()
    three = _change({"ns_backend": counting, "ns_steps": 3})
    assert counting.asked == {3}
    five = _change({"ns_backend": _CountingNewtonSchulz(), "ns_steps": 5})
    muon = [name for name in five if name.endswith(("up.weight", "down.weight"))]
    assert all(not torch.allclose(three[name], five[name], rtol=1e-3) for name in muon), "fewer steps are less"
    plain, scaled, original = (_change({"scale": scale}) for scale in ("none", "match_rms_adamw", "original"))
    for name in muon:
        rows, columns = plain[name].shape
        assert torch.allclose(scaled[name], plain[name] * 0.2 * math.sqrt(max(rows, columns)))
        assert torch.allclose(original[name], plain[name] * math.sqrt(max(1, rows / columns)))
    flat, ahead = _change({"nesterov": False, "momentum": 0.5}), _change({"nesterov": True, "momentum": 0.5})
    for name in muon:
        assert torch.allclose(flat[name], ahead[name]), "in the first step both have the gradient's direction"


@pytest.mark.parametrize(
    ("rule", "expected"), [("match_rms_adamw", 0.2 * math.sqrt(12)), ("original", math.sqrt(3)), ("none", 1.0)]
)
def test_scale_of_a_tall_matrix(rule: Scale, expected: float) -> None:
    assert update_scale(rule, 12, 4) == pytest.approx(expected)
    assert update_scale("original", 4, 12) == 1.0


def _closures() -> None:
    model, optimizer = _fresh()
    calls = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = lm_loss(model, batch(len(calls), dist.get_rank()))
        loss.backward()
        calls.append(float(loss.detach()))
        return calls[-1]

    with torch.no_grad():
        found = optimizer.step(closure)
    assert found == calls[0] and len(calls) == 1
    optimizer.step(closure)
    assert optimizer.step() is None
    other_model, other = _fresh()
    for step in range(2):
        _backward(other_model, step, dist.get_rank())
        other.step()
        if step == 0:
            other.zero_grad()
    other.step()
    expected = _masters(other)
    assert all(torch.equal(value, expected[name]) for name, value in _masters(optimizer).items())


def _settings_are_refused() -> None:
    model = _fresh()[0]
    bad: list[dict[str, object]] = [
        {"ns_steps": 0}, {"scale": "big"}, {"non_finite": "ignore"}, {"ns_backend": "fast"}, {"lr": math.nan},
        {"lr": -0.1}, {"weight_decay": math.inf}, {"lr": "fast"}, {"lr": torch.ones(2)}, {"adamw_betas": (1.0, 0.9)},
        {"adamw_betas": 0.9}, {"ns_steps": 2.5},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(dmuon.SettingError, match=next(iter(options)).removeprefix("adamw_")):
            dmuon.Muon(model, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"restart_iterations \[4\] lie beyond the last of 4 steps"):
        dmuon.Muon(model, ns_steps=4, ns_backend=dmuon.NewtonSchulz(restart_iterations=[2, 4]))
    for max_norm in (0.0, math.nan, "1", None):
        with pytest.raises(dmuon.SettingError, match="max_norm"):
            dmuon.clip_grad_norm_(dmuon.Muon(model), max_norm)  # type: ignore[arg-type]
    with pytest.raises(dmuon.SettingError, match="not SGD"):
        dmuon.clip_grad_norm_(torch.optim.SGD(model.parameters()), 1.0)  # type: ignore[arg-type]
    groups = [{"params": list(model.parameters()), "eps": 1e-7, "adamw_eps": 1e-6}]
    assert {group.get("eps") for group in dmuon.Muon(model, param_groups=groups).param_groups} == {None, 1e-6}
    assert find_runtime(model).plan.num_matrices == 6


def _all() -> None:
    _maths()
    _closures()
    _settings_are_refused()


def test_maths_closures_and_settings() -> None:
    """``ns_steps`` reaches Newton-Schulz, scales are the formulas, a closure runs once with gradients."""
    run_ranks(2, _all)
