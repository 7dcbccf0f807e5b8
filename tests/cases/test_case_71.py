"""Case 71. Symptom elsewhere: depthwise kernels are orthogonalised, or hardly anything of a CNN is, unnoticed."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import dmuon_runtime as dmuon
from tests.cases.common import dedicate, plan


class Block(nn.Module):
    """A depthwise temporal kernel, a depthwise 2-D kernel, a residual block's convolutions and a patch embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.temporal = nn.Conv1d(64, 64, 4, groups=64, bias=False)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16, bias=False)
        self.conv1 = nn.Conv2d(16, 32, 3, bias=False)
        self.conv2 = nn.Conv2d(32, 32, 3, bias=False)
        self.downsample = nn.Conv2d(16, 32, 1, bias=False)
        self.patch = nn.Conv2d(3, 16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Never called."""
        return x


FLAT: dict[str, object] = {"set": {"matrix_view": "flatten"}}


def test_depthwise_kernels_are_refused_with_the_reason() -> None:
    with pytest.raises(dmuon.RouteRefused) as found:
        plan(Block(), [FLAT])
    assert found.value.names == ("temporal.weight", "depthwise.weight")
    assert "grouped convolution" in str(found.value) and '"route": "adamw"' in str(found.value)


def test_other_kernels_need_a_stated_reading() -> None:
    with pytest.raises(dmuon.RouteRefused) as found:
        plan(Block())
    assert len(found.value.names) == 6
    small = {"name": ["temporal", "depthwise"], "set": {"route": "adamw"}}
    shapes = {entry.name: entry.num_matrices for entry in plan(Block(), [FLAT, small]).parameters}
    assert shapes == {
        "temporal.weight": 0, "depthwise.weight": 0, "conv1.weight": 1, "conv2.weight": 1, "downsample.weight": 1,
        "patch.weight": 1,
    }  # fmt: skip


def test_little_on_the_muon_route_is_pointed_out(one_rank: None) -> None:
    """The table shows the share of each route, and below a tenth it warns."""
    model = Block()
    rest = {"name": ["temporal", "depthwise", "conv", "downsample"], "set": {"route": "adamw"}}
    optimizer = dedicate(model, [FLAT, rest])
    summary = dmuon.summarize_param_groups(model, optimizer)
    elements = sum(p.numel() for p in model.parameters())
    assert summary["routes"]["muon"]["element_ratio"] == pytest.approx(16 * 48 / elements)  # type: ignore[index]
    assert any("muon route" in text for text in summary["warnings"])  # type: ignore[attr-defined]
