"""The Muon route's part of one step: momentum, what goes to Newton-Schulz, decay and change, matrix by matrix.

A looked-ahead gradient is made when Newton-Schulz asks for it, and a result is applied as soon as its parameter is
complete. Of all matrices that a rank owns only those of one round are held twice more; for a model of 3 billion
parameters with one owner that is 16 GiB less than all of them at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from torch import Tensor

from dmuon_runtime.groups import learning_rate
from dmuon_runtime.matrices import join_blocks, matrix_blocks
from dmuon_runtime.pieces import Piece
from dmuon_runtime.updates import apply_change, momentum_update

__all__ = ["SCALES", "MatrixUpdates", "Scale", "update_scale"]

Scale = Literal["match_rms_adamw", "original", "none"]
SCALES: Final = ("match_rms_adamw", "original", "none")


def update_scale(rule: Scale, rows: int, columns: int) -> float:
    """Return the factor on an orthogonal update of ``rows`` by ``columns``.

    ``match_rms_adamw``: ``0.2 sqrt(max(rows, columns))`` gives the update the RMS that AdamW typically has (Liu et al.,
    2025); ``original``: ``sqrt(max(1, rows / columns))`` (Jordan et al., 2024).
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 1.0


@dataclass(slots=True)
class _Member:
    """One parameter in one step; its blocks are what ``matrix_blocks`` cuts."""

    piece: Piece
    buffer: Tensor
    group: Mapping[str, object]
    num_blocks: int
    looked_ahead: list[Tensor] = field(default_factory=list)
    """Blocks that Newton-Schulz has not asked for yet; empty before the first and after the last."""
    results: dict[int, Tensor] = field(default_factory=dict)
    """By block, until there are all of them."""


class MatrixUpdates:
    """The updates of one step. Indices count blocks [..., m, n] over all parameters, in their order.

    Args:
        members: each parameter's piece, its momentum buffer and its optimizer group.
        nesterov, scale: as :class:`~dmuon_runtime.muon.Muon`.
        gate: None, or 0-dim: 0 leaves momentum and weights as they are.
    """

    def __init__(
        self,
        members: Sequence[tuple[Piece, Tensor, Mapping[str, object]]],
        *,
        nesterov: bool,
        scale: Scale,
        gate: Tensor | None,
    ) -> None:
        self.gate = gate
        self.like: list[Tensor] = []
        """A tensor of the shape, dtype and device of each block."""
        self.orthogonalized: Counter[str] = Counter()
        """Matrices that came back, by parameter."""
        self._nesterov, self._scale = nesterov, scale
        self._members: list[_Member] = []
        self._places: list[tuple[int, int]] = []
        """Member and block of each index."""
        self._squares: dict[int, Tensor] = {}
        for number, (piece, buffer, group) in enumerate(members):
            blocks = _blocks(piece.gradient, piece)
            self.like += blocks
            self._places += [(number, block) for block in range(len(blocks))]
            self._members.append(_Member(piece, buffer, group, len(blocks)))

    @property
    def squares(self) -> list[Tensor]:
        """Sums of squares of the changes before decay, in the order of the parameters."""
        return [self._squares[number] for number in range(len(self._members))]

    def load(self, index: int) -> Tensor:
        """Return block ``index`` as Newton-Schulz takes it; the first one of a parameter updates its momentum.

        The blocks of a parameter are asked for once each.
        """
        number, block = self._places[index]
        member = self._members[number]
        if not member.looked_ahead:
            momentum = cast(float, member.group["momentum"])
            ahead = momentum_update(member.buffer, member.piece.gradient, momentum, self._nesterov, self.gate)
            member.looked_ahead = _blocks(ahead, member.piece)
        return member.looked_ahead[block]

    def apply(self, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Take in what came back, and change the weights of every parameter that is complete with it."""
        for index, result in zip(indices, results, strict=True):
            number, block = self._places[index]
            member = self._members[number]
            member.results[block] = result
            self.orthogonalized[member.piece.plan.name] += math.prod(result.shape[:-2])
            if len(member.results) == member.num_blocks:
                self._squares[number] = self._change(member)

    def _change(self, member: _Member) -> Tensor:
        piece, lr = member.piece, learning_rate(member.group)
        parts = [member.results[block] for block in range(member.num_blocks)]
        member.results, member.looked_ahead = {}, []
        factors = [-lr * update_scale(self._scale, *part.shape[-2:]) for part in parts]
        if len(parts) > 1:  # blocks of different shapes have factors of their own
            parts, factors = [part * factor for part, factor in zip(parts, factors, strict=True)], [1.0]
        direction = join_blocks(parts, piece.master.shape, piece.plan.matrix_view)
        decay = lr * cast(float, member.group["weight_decay"])
        return apply_change(piece.master, direction, factors[0], decay, self.gate)


def _blocks(tensor: Tensor, piece: Piece) -> list[Tensor]:
    return matrix_blocks(tensor, piece.plan.matrix_view, piece.plan.split_rows)
