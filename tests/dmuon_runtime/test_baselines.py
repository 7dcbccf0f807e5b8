"""The plain baselines on one device: the split, groups, errors, and torch's own numbers bit by bit."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import dmuon_runtime as dmuon
from dmuon_runtime.baselines import BaselineConfig, Tandem, WholeMatrixMuon, route_parameters


class Zoo(nn.Module):
    """One parameter of each kind that the split must tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 6)
        self.proj = nn.Linear(6, 8)
        self.row = nn.Parameter(torch.randn(1, 6))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.gate = nn.Parameter(torch.ones(()))
        self.experts = nn.Parameter(torch.randn(2, 6, 6))
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.prefix_gru = nn.GRU(6, 6)
        self.codebook = nn.Parameter(torch.randn(5, 6))
        self.mixing = nn.Linear(8, 6, bias=False)
        self.lm_head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, 11]; gate, experts, GRU and codebook stay unused."""
        hidden = self.proj(self.wte(tokens) + self.row + self.column.mT)
        return self.lm_head(self.frozen(self.mixing(hidden)))


def config(optimizer: str, **changes: object) -> SimpleNamespace:
    """What a trainer of another project would pass: required attributes only."""
    settings: dict[str, object] = {"optimizer": optimizer, "lr": 1e-3, "weight_decay": 0.1}
    settings |= {"weight_decay_exclude_1d": False, "muon_lr": 0.02, "muon_momentum": 0.9, "muon_weight_decay": 0.05}
    settings |= {"muon_ns_steps": 4, "muon_adjust_lr_fn": "match_rms_adamw"}
    return SimpleNamespace(**(settings | changes))


def names(group: dict[str, object]) -> set[str]:
    return set(group["param_names"])  # type: ignore[call-overload]


def test_the_split_says_what_and_why() -> None:
    rules = {entry.name: (entry.route, entry.rule) for entry in route_parameters(Zoo(), "muon")}
    assert {name for name, (route, _) in rules.items() if route == "muon"} == {"proj.weight", "mixing.weight"}
    assert rules["wte.weight"] == ("adamw", "embedding"), "by its module: no hint has this name"
    assert rules["row"][1] == "shape (1, 6) is no matrix" and rules["column"][1] == "shape (6, 1) is no matrix"
    assert rules["prefix_gru.weight_hh_l0"][1] == "name contains 'prefix_gru'"
    assert rules["lm_head.weight"][1] == "name contains 'lm_head'"
    assert rules["experts"][0] == rules["gate"][0] == "adamw" and "frozen.weight" not in rules
    other = {entry.name: entry.route for entry in route_parameters(Zoo(), "muon", hints=("mixing",))}
    assert (other["mixing.weight"], other["lm_head.weight"], other["codebook"]) == ("adamw", "muon", "muon")
    assert {entry.route for entry in route_parameters(Zoo(), "adamw")} == {"adamw"}
    meta = {entry.name: entry.route for entry in route_parameters(Zoo().to("meta"), "muon")}
    assert meta == {name: route for name, (route, _) in rules.items()}, "shapes suffice"


def test_a_tied_head_is_no_matrix_under_either_name() -> None:
    model = nn.Module()
    model.output = nn.Linear(4, 9, bias=False)
    model.lm_head = nn.Linear(4, 9, bias=False)
    model.lm_head.weight = model.output.weight
    (entry,) = route_parameters(model, "muon")
    assert (entry.name, entry.aliases, entry.route) == ("output.weight", ("lm_head.weight",), "adamw")


def test_groups_and_their_settings() -> None:
    model = Zoo()
    muon, adamw = dmuon.build_optimizers(model, config("muon", weight_decay_exclude_1d=True))
    assert type(muon) is WholeMatrixMuon and isinstance(muon, torch.optim.Muon) and type(adamw) is torch.optim.AdamW
    (group,) = muon.param_groups
    assert (group["name"], group["lr"], group["momentum"], group["weight_decay"]) == ("muon", 0.02, 0.9, 0.05)
    assert (group["ns_steps"], group["adjust_lr_fn"], group["nesterov"]) == (4, "match_rms_adamw", True)
    base, no_decay = adamw.param_groups
    assert (base["name"], base["lr"], base["weight_decay"]) == ("base", 1e-3, 0.1)
    assert (no_decay["name"], no_decay["weight_decay"]) == ("base_no_decay", 0.0)
    assert names(no_decay) == {"proj.bias", "gate", "prefix_gru.bias_ih_l0", "prefix_gru.bias_hh_l0"}
    assert "row" in names(base) and names(group) | names(base) | names(no_decay) == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    (whole,) = dmuon.build_optimizers(model, config("adamw"))
    assert [group["name"] for group in whole.param_groups] == ["base"]
    (split,) = dmuon.build_optimizers(model, config("adamw", weight_decay_exclude_1d=True))
    assert [group["name"] for group in split.param_groups] == ["base", "base_no_decay"]
    assert len(dmuon.build_optimizers(nn.Linear(3, 3, bias=False), config("muon"))) == 1
    assert [type(each) for each in dmuon.build_optimizers(nn.LayerNorm(3), config("muon"))] == [torch.optim.AdamW]


def test_errors() -> None:
    with pytest.raises(ValueError, match="Unsupported optimizer: 'sgd'"):
        dmuon.build_optimizers(Zoo(), config("sgd"))
    for kind in ("adamw", "muon"):
        with pytest.raises(ValueError, match="No trainable parameters found to optimize"):
            dmuon.build_optimizers(Zoo().requires_grad_(False), config(kind))
    incomplete = config("adamw")
    del incomplete.weight_decay_exclude_1d
    with pytest.raises(AttributeError, match="weight_decay_exclude_1d"):
        dmuon.build_optimizers(Zoo(), incomplete)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="non_finite"):
        Tandem(Zoo(), [], non_finite="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_numbers_are_torchs(nesterov: bool) -> None:
    """Bit by bit, a missing gradient included; in bfloat16 without nesterov torch's buffer is normalised in place."""
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape)) for shape in ((6, 10), (10, 6), (7, 7))]
    theirs = copy.deepcopy(mine)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    ours, stock = WholeMatrixMuon(mine, **settings), torch.optim.Muon(theirs, **settings)  # type: ignore[arg-type]
    for step in range(3):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            a.grad = None if (step, index) == (1, 0) else torch.randn_like(a)
            b.grad = None if a.grad is None else a.grad.clone()
        assert ours.step(lambda: 2.5) == 2.5
        stock.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    weight = nn.Parameter(torch.randn(4, 5, dtype=torch.bfloat16))
    optimizer = WholeMatrixMuon([weight], momentum=0.5, nesterov=False)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], weight.grad * 0.5)


def tandem(model: nn.Module, **changes: object) -> Tandem:
    return Tandem(model, dmuon.build_optimizers(model, BaselineConfig(optimizer="muon")), **changes)  # type: ignore[arg-type]


def backward(model: nn.Module, seed: int) -> None:
    tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(seed))
    nn.functional.cross_entropy(model(tokens), tokens).backward()


def test_a_bad_step_leaves_no_trace_in_either(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Zoo()
    clean = copy.deepcopy(model)
    mine, other = tandem(model), tandem(clean)
    backward(model, 1)
    model.proj.weight.grad[2, 3] = math.nan  # type: ignore[index]
    kept = model.row.grad.clone()  # type: ignore[union-attr]
    assert not math.isfinite(mine.clip(1.0)) and torch.equal(model.row.grad, kept), "nothing is scaled by NaN"  # type: ignore[arg-type]
    mine.step()
    assert mine.last_step is not None and mine.last_step.offenders == ("proj.weight",)
    assert mine.last_step.updates == {}
    assert "proj.weight" in caplog.text
    for driven, driver in ((model, mine), (clean, other)):
        driver.zero_grad()
        backward(driven, 2)
        norm = driver.clip(0.01)
        grads = [p.grad for p in driven.parameters() if p.grad is not None]
        assert float(torch.nn.utils.get_total_norm(grads)) == pytest.approx(0.01, rel=1e-3) and norm > 0.01
        driver.step()
        assert driver.last_step is not None and driver.last_step.grad_norm == pytest.approx(float(norm))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clean.parameters(), strict=True))
    mine.non_finite = "raise"
    mine.zero_grad()
    backward(model, 3)
    model.lm_head.weight.grad[0, 0] = math.inf  # type: ignore[index]
    with pytest.raises(dmuon.NonFiniteGradient, match=r"lm_head\.weight"):
        mine.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clean.parameters(), strict=True))


def test_every_group_has_a_rate_of_its_own() -> None:
    """Case 16: a schedule multiplies each base rate, and both optimizers follow."""
    model = Zoo()
    driver = tandem(model)
    base = [group["lr"] for group in driver.param_groups]
    assert base == [0.02, 1e-3]
    for group, rate in zip(driver.param_groups, base, strict=True):
        group["lr"] = rate * 0.0
    before = copy.deepcopy(model.state_dict())
    backward(model, 0)
    driver.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_size_of_updates_is_that_of_the_weights_change() -> None:
    """Two steps, one parameter having a gradient in the second alone; no decay, so that the change is the update."""
    torch.manual_seed(0)
    model = Zoo()
    config = BaselineConfig(optimizer="muon", weight_decay=0.0)
    driver = Tandem(model, dmuon.build_optimizers(model, config))
    for step in range(2):
        backward(model, step)
        if step == 0:
            model.row.grad = None
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        driver.step()
        assert driver.last_step is not None
        squares, numbers = {"muon": 0.0, "adamw": 0.0}, {"muon": 0, "adamw": 0}
        for name, old in before.items():
            route = "muon" if name in ("proj.weight", "mixing.weight") else "adamw"
            squares[route] += float((model.get_parameter(name).detach() - old).double().square().sum())
            numbers[route] += old.numel()
        for route, (square, elements) in driver.last_step.updates.items():
            assert elements == numbers[route] and square == pytest.approx(squares[route], rel=1e-3)
        assert set(driver.last_step.updates) == {"muon", "adamw"}
        driver.zero_grad()


def test_state_by_name_continues_exactly() -> None:
    torch.manual_seed(1)
    model = Zoo()
    driver = tandem(model)
    fresh = driver.state_by_name()["state"]
    assert float(fresh["lm_head.weight"]["step"]) == 0.0 and not fresh["proj.weight"]["momentum_buffer"].any()
    assert "gate" in fresh, "from construction, gradient or not"
    for step in range(2):
        driver.zero_grad()
        backward(model, step)
        driver.step()
    saved = copy.deepcopy(driver.state_by_name())
    other = copy.deepcopy(model)
    resumed = tandem(other)
    resumed.load_state_by_name(saved)
    for driven, each in ((model, driver), (other, resumed)):
        each.zero_grad()
        backward(driven, 9)
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_degenerate_shapes_train_and_none_is_a_matrix() -> None:
    """Case 29: torch's Muon divides by zero at (4, 0) and takes (1, 64) for a matrix; very tall ones are matrices."""
    shapes = ((1, 64), (64, 1), (1, 1), (0, 4), (4, 0), (512, 2))
    model = nn.Module()
    for index, shape in enumerate(shapes):
        model.register_parameter(f"w{index}", nn.Parameter(torch.ones(shape)))
    driver = tandem(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    driver.clip(1.0)
    driver.step()
    assert {each.name: each.route for each in route_parameters(model, "muon")}["w5"] == "muon"
    assert {each.route for each in route_parameters(model, "muon")[:-1]} == {"adamw"}
    assert all(bool((p < 1).all()) and bool(torch.isfinite(p).all()) for p in model.parameters())
