"""Each rule of strict explicit selection: what is refused, that a refusal moves nothing, the record, the numbers."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuon_runtime as dmuon


class Net(nn.Module):
    """Two matrices, a norm, an embedding tied to the output, a frozen matrix."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6)
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, 9]."""
        x = self.embed(tokens)
        return self.head(self.norm(self.frozen(x + self.down(self.up(x).relu()))))


MATRICES = ("up.weight", "down.weight")


def make(model: nn.Module, selection: Any = MATRICES, **settings: Any) -> dmuon.MuonAdamW:
    return dmuon.MuonAdamW(model, selection, **settings)


def backward(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    tokens = torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(seed))
    nn.functional.cross_entropy(model(tokens), tokens).backward()


def train(model: nn.Module, optimizer: dmuon.MuonAdamW, seeds: range) -> None:
    for seed in seeds:
        backward(model, seed)
        optimizer.step()


def everything(model: nn.Module, optimizer: dmuon.MuonAdamW) -> dict[str, Tensor]:
    """Copies of all weights and all state."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names.get(id(parameter))}/{key}": value.clone() for key, value in state.items()}
    return found


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_selection_is_explicit_and_whole() -> None:
    model = Net()
    by_object = make(model, [model.up.weight, "down.weight"])
    assert by_object.muon_parameter_count == 2
    muon, adamw = by_object.param_groups
    assert muon["param_names"] == ["up.weight", "down.weight"]
    assert adamw["param_names"] == ["embed.weight", "norm.weight", "norm.bias"], "the tied one once, no frozen one"
    assert len(make(model.up, ["weight"]).param_groups) == 1


@pytest.mark.parametrize(
    ("selection", "texts"),
    [
        ([], ["no parameter was selected"]),
        (["up.weight", "up.weight"], ["[1] up.weight is selected twice"]),
        (["embed.weight", "head.weight"], ["[1] embed.weight is selected twice"]),
        (["up.weight", "up.wait"], ["[1] 'up.wait' is no parameter"]),
        ([nn.Parameter(torch.ones(3, 4))], ["the tensor of shape (3, 4) is no parameter"]),
        (["frozen.weight"], ["frozen.weight is frozen"]),
        (["norm.weight"], ["norm.weight has shape (6,), which is no matrix"]),
        (["thin"], ["thin has shape (1, 4), which is no matrix"]),
        (["complex"], ["complex has dtype torch.complex64"]),
        (["up.weight"], ["complex has dtype torch.complex64; AdamW"]),
        (["frozen.weight", "norm.bias", "nothing"], ["frozen.weight is frozen", "norm.bias has shape", "'nothing' is"]),
    ],
)
def test_a_bad_selection_names_every_mistake(selection: list[Any], texts: list[str]) -> None:
    model = Net()
    if selection == ["thin"]:
        model.thin = nn.Parameter(torch.ones(1, 4))
    if selection == ["complex"] or "AdamW" in texts[0]:
        model.complex = nn.Parameter(torch.ones(3, 4, dtype=torch.complex64))
    with pytest.raises(dmuon.SelectionError) as caught:
        make(model, selection)
    assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_two_rates_or_one_and_a_ratio() -> None:
    model = Net()
    rates = [[group["lr"] for group in each.param_groups] for each in (make(model), make(model, adamw_lr=0.5))]
    assert rates == [[0.02, pytest.approx(0.0003)], [0.02, 0.5]]
    assert [g["lr"] for g in make(model, lr=1.0, adamw_lr_ratio=0.1).param_groups] == [1.0, 0.1]
    assert make(model, adamw_lr_ratio=0.0).param_groups[1]["lr"] == 0.0, "zero is a ratio"
    with pytest.raises(dmuon.SettingError, match="not both"):
        make(model, adamw_lr=0.1, adamw_lr_ratio=0.1)
    one, two = Net(), Net()
    for net, rate in ((one, None), (two, 0.04 * 0.015)):
        backward(net)
        make(net).step_with_lrs(0.04, rate)
    assert_same(dict(one.state_dict()), dict(two.state_dict()))
    backward(two)
    with pytest.raises(dmuon.SettingError, match="adamw_lr is needed"):
        make(two, adamw_lr=0.1).step_with_lrs(0.04)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf, 1e39, True, None])
def test_rates_are_finite_not_negative_and_fit_float32(rate: Any) -> None:
    model = Net()
    with pytest.raises(dmuon.SettingError, match="muon_lr must be a finite number"):
        make(model, lr=rate)
    optimizer = make(model)
    backward(model)
    before = everything(model, optimizer)
    with pytest.raises(dmuon.SettingError, match="muon_lr"):
        optimizer.step_with_lrs(rate, 0.1)
    if rate is not None:
        with pytest.raises(dmuon.SettingError, match="adamw_lr"):
            optimizer.step_with_lrs(0.1, rate)
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(dmuon.SettingError, match="adamw_lr"):
        optimizer.step()
    assert_same(before, everything(model, optimizer))


def _other_shape(model: Net) -> None:
    model.norm.bias.data = torch.zeros(7, dtype=torch.float64)


def _other_dtype(model: Net) -> None:
    model.down.to(torch.float32)


def _new(model: Net) -> None:
    model.extra = nn.Parameter(torch.ones(2))


def _gone(model: Net) -> None:
    del model.norm.bias
    model.norm.bias = None  # type: ignore[assignment]


def _replaced(model: Net) -> None:
    model.norm.weight = nn.Parameter(model.norm.weight.detach().clone())


def _frozen(model: Net) -> None:
    model.norm.weight.requires_grad_(False)


def _untied(model: Net) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


@pytest.mark.parametrize("change", [_other_shape, _other_dtype, _new, _gone, _replaced, _frozen, _untied])
def test_a_changed_model_is_refused_before_either_group_moves(change: Any) -> None:
    model = Net()
    optimizer = make(model)
    train(model, optimizer, range(2))
    backward(model)
    change(model)
    weights, before = [p.detach().clone() for p in model.parameters()], len(optimizer.state)
    with pytest.raises(dmuon.ParametersChanged, match=r"norm|down|extra|embed|head"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert len(optimizer.state) == before


@pytest.mark.parametrize(
    ("name", "gradient", "text"),
    [
        ("norm.bias", torch.zeros(7, dtype=torch.float64), "gradient has shape"),
        ("norm.bias", torch.zeros(6, dtype=torch.float32), "gradient has dtype torch.float32"),
        ("norm.bias", torch.zeros(6, dtype=torch.float64, device="meta"), "gradient has device meta"),
        ("norm.bias", torch.zeros(6, dtype=torch.float64).to_sparse(), "gradient has layout"),
        ("frozen.weight", torch.zeros(6, 6, dtype=torch.float64), "a gradient of a frozen parameter"),
        ("ghost", torch.zeros(1), "a gradient of no parameter"),
    ],
)
def test_gradients_must_fit_before_either_group_moves(name: str, gradient: Tensor, text: str) -> None:
    """All of them wrong at AdamW's end, while those of Muon are right."""
    model = Net()
    optimizer = make(model)
    train(model, optimizer, range(2))
    backward(model)
    given = {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {name: gradient}
    before = everything(model, optimizer)
    with pytest.raises(dmuon.GradientMismatch, match=text):
        optimizer.step_with_lrs(0.1, gradients=given)
    assert_same(before, everything(model, optimizer))
    del given[name]
    optimizer.step_with_lrs(0.1, gradients=given)


def test_gradients_on_frozen_parameters_and_under_two_names() -> None:
    model = Net()
    optimizer = make(model)
    backward(model)
    model.frozen.weight.grad = torch.zeros_like(model.frozen.weight)
    with pytest.raises(dmuon.GradientMismatch, match=r"frozen\.weight"):
        optimizer.step()
    tied = torch.zeros_like(model.embed.weight)
    with pytest.raises(dmuon.GradientMismatch, match="same tensor"):
        optimizer.step_with_lrs(0.1, gradients={"embed.weight": tied, "head.weight": tied})
    optimizer.step_with_lrs(0.1, gradients={"head.weight": tied})


def test_sharded_parameters_and_gradients_are_refused(tmp_path: Any) -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Net()
        optimizer = make(model)
        cut = distribute_tensor(torch.ones(10, 6, dtype=torch.float64), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(dmuon.UnsupportedFeature, match=r"sharded gradients: up\.weight"):
            optimizer.step_with_lrs(0.1, gradients={"up.weight": cut})
        model.up.weight = nn.Parameter(cut)
        with pytest.raises(NotImplementedError, match=r"sharded parameters: up\.weight.*shards apart"):
            optimizer.step()
        with pytest.raises(dmuon.UnsupportedFeature, match=r"sharded parameters: up\.weight"):
            make(model)
    finally:
        destroy_process_group()


def test_a_missing_gradient_skips_momentum_and_decay() -> None:
    model = Net()
    optimizer = make(model, weight_decay=0.5, adamw_weight_decay=0.5)
    train(model, optimizer, range(2))
    backward(model)
    model.up.weight.grad = model.norm.bias.grad = None
    before = everything(model, optimizer)
    optimizer.step()
    after = everything(model, optimizer)
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert not {name for name in moved if name.startswith(("up.weight", "norm.bias", "frozen"))}
    assert {"down.weight", "down.weight/momentum_buffer", "norm.weight", "norm.weight/step"} <= moved


def test_a_skip_changes_nothing() -> None:
    model = Net()
    optimizer = make(model)
    backward(model)
    model.up.weight.grad.fill_(math.nan)  # type: ignore[union-attr]
    before = everything(model, optimizer)
    optimizer.step_with_lrs(0.1, skip=True)
    assert_same(before, everything(model, optimizer))


@pytest.mark.parametrize("convention", ["sgd", "ema"])
def test_the_numbers(convention: Any) -> None:
    """Momentum and update from the formulas, AdamW as torch's; the tied weight has moved once."""
    model, other = Net(), Net()
    optimizer = make(model, lr=0.1, adamw_lr=0.01, momentum=0.8, momentum_convention=convention, weight_decay=0.3)
    theirs = torch.optim.AdamW([other.embed.weight, other.norm.weight, other.norm.bias], lr=0.01, weight_decay=0.01)
    buffers = {name: torch.zeros_like(other.get_parameter(name)) for name in MATRICES}
    for seed in range(3):
        backward(model, seed)
        backward(other, seed)
        optimizer.step()
        theirs.step()
        for name in MATRICES:
            weight = other.get_parameter(name)
            share = 0.2 if convention == "ema" else 1.0
            gradient = weight.grad
            assert gradient is not None
            buffers[name] = 0.8 * buffers[name] + share * gradient
            update = dmuon.newton_schulz(share * gradient + 0.8 * buffers[name])
            weight.data = weight * (1 - 0.1 * 0.3) - 0.1 * 0.2 * math.sqrt(10) * update
    for mine, reference in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)
    assert float(optimizer.state[model.embed.weight]["step"]) == 3.0


def resume(record_of: dmuon.MuonAdamW, **settings: Any) -> dmuon.MuonAdamW:
    fresh = make(Net(), **settings)
    fresh.load_record(record_of.record())
    return fresh


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_record_continues_without_loss(dtype: torch.dtype) -> None:
    """Through a file; in the middle of a warm-up, whose base rates survive; momentum in its own dtype."""
    model, saved = Net(dtype), io.BytesIO()
    optimizer = make(model)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    backward(model)
    model.norm.bias.grad = None
    optimizer.step()
    warmup.step()
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    saved.seek(0)
    weights, state = torch.load(saved, weights_only=True)
    other = Net(dtype)
    other.load_state_dict(weights)
    resumed = make(other)
    resumed.load_state_dict(state)
    assert_same(everything(model, optimizer), everything(other, resumed))
    record = resumed.record()
    assert (record.muon_state_count, record.adamw_state_count) == (2, 2), "no state before the first gradient"
    assert [g["initial_lr"] for g in resumed.param_groups] == [g["initial_lr"] for g in optimizer.param_groups]
    assert [g["lr"] for g in resumed.param_groups] == [0.02 * 2 / 4, pytest.approx(0.0003 * 2 / 4)]
    train(model, optimizer, range(1, 3))
    train(other, resumed, range(1, 3))
    assert_same(everything(model, optimizer), everything(other, resumed))


def test_a_record_is_a_copy() -> None:
    model = Net()
    optimizer = make(model)
    train(model, optimizer, range(1))
    record = optimizer.record()
    kept = copy.deepcopy(record.to_dict())
    train(model, optimizer, range(1, 3))
    assert torch.equal(record.muon["up.weight"], kept["muon"]["up.weight"])
    assert float(record.adamw["norm.bias"].step) == 1.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"momentum_convention": "ema"}, "configuration"),
        ({"momentum": 0.9}, "configuration"),
        ({"nesterov": False}, "configuration"),
        ({"adamw_betas": (0.8, 0.9)}, "configuration"),
        ({"adamw_lr": 0.0003}, "configuration"),
        ({"newton_schulz": dmuon.NewtonSchulz(coefficients=dmuon.YOU_COEFFICIENTS)}, "configuration"),
        ({"selection": ["up.weight"]}, "down.weight: selected True, expected False"),
    ],
)
def test_a_record_of_another_configuration_or_selection_is_refused(settings: dict[str, Any], text: str) -> None:
    model, other = Net(), Net()
    optimizer, target = make(model), make(other, **settings)
    train(model, optimizer, range(2))
    train(other, target, range(5, 6))
    before = everything(other, target)
    with pytest.raises(dmuon.StateMismatch, match=text):
        target.load_record(optimizer.record())
    assert_same(before, everything(other, target))


def _damage(record: dmuon.MuonAdamWRecord) -> dict[str, dmuon.MuonAdamWRecord]:
    def with_(**changes: Any) -> dmuon.MuonAdamWRecord:
        return dataclasses.replace(record, **changes)

    bias, up = record.adamw["norm.bias"], record.muon["up.weight"]
    zero = dataclasses.replace(bias, step=torch.zeros(()))
    return {
        "version 2, expected 1": with_(version=2),
        "up.weight: momentum is": with_(muon=record.muon | {"up.weight": up.float()}),
        "up.weight: momentum is no tensor": with_(muon=record.muon | {"up.weight": None}),
        "ghost has state of Muon": with_(muon=record.muon | {"ghost": up}),
        "norm.weight has state of Muon": with_(muon=record.muon | {"norm.weight": up}),
        "up.weight has state of AdamW": with_(adamw=record.adamw | {"up.weight": bias}),
        "frozen.weight has state of AdamW": with_(adamw=record.adamw | {"frozen.weight": bias}),
        "norm.bias: step count": with_(adamw=record.adamw | {"norm.bias": zero}),
        "rates of the groups": with_(rates={"muon": {"lr": 0.1}}),
        "head.weight": with_(manifest=tuple(dataclasses.replace(e, names=e.names[:1]) for e in record.manifest)),
    }


def test_a_damaged_record_is_refused_whole() -> None:
    model = Net()
    optimizer = make(model)
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    for text, record in _damage(optimizer.record()).items():
        with pytest.raises(dmuon.StateMismatch) as caught:
            optimizer.load_record(record)
        assert text in str(caught.value), str(caught.value)
    for document in (
        {"state": {}, "param_groups": []},
        {"version": 1},
        {"version": 1, "config_key": "", "manifest": 3},
    ):
        with pytest.raises(dmuon.StateMismatch, match="record"):
            optimizer.load_state_dict(document)
    assert_same(before, everything(model, optimizer))


def test_the_selection_is_final_and_settings_are_checked() -> None:
    model = Net()
    with pytest.raises(dmuon.SelectionError, match="final"):
        make(model).add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for settings in ({"momentum": 1.0}, {"adamw_betas": (0.9, -0.1)}, {"ns_steps": 0}, {"scale": "big"},
                     {"momentum_convention": "nag"}, {"weight_decay": math.nan}, {"adamw_eps": -1.0}):  # fmt: skip
        with pytest.raises(dmuon.SettingError):
            make(model, **settings)
    with pytest.raises(ValueError, match=r"restart_iterations \[4\] lie beyond the last of 4 steps"):
        make(model, ns_steps=4, newton_schulz=dmuon.NewtonSchulz(restart_iterations=[2, 4]))
