"""The Muon route's part of one step: momentum, what goes to Newton-Schulz, decay and change, round by round.

Looked-ahead gradients are made when Newton-Schulz asks for them, and a result is applied as soon as its parameter is
complete, all of a round at once. Of all matrices that a rank owns only those of one round are held twice more; for a
model of 3 billion parameters with one owner that is 16 GiB less than all of them at once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from torch import Tensor

from dmuon_runtime.groups import learning_rate
from dmuon_runtime.matrices import join_blocks, matrix_blocks
from dmuon_runtime.pieces import Piece
from dmuon_runtime.updates import apply_changes, look_ahead, momentum_updates

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
    moved: bool = False
    """The momentum is that of this step."""
    looked_ahead: dict[int, Tensor] = field(default_factory=dict)
    """Blocks that Newton-Schulz has not asked for yet; none before the first and after the last."""
    results: dict[int, Tensor] = field(default_factory=dict)
    """By block, until there are all of them."""
    squares: Tensor | None = None
    """Sums of squares of the change before decay, once there is one."""


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
        for number, (piece, buffer, group) in enumerate(members):
            blocks = _blocks(piece.gradient, piece)
            self.like += blocks
            self._places += [(number, block) for block in range(len(blocks))]
            self._members.append(_Member(piece, buffer, group, len(blocks)))

    @property
    def squares(self) -> list[Tensor]:
        """Sums of squares of the changes before decay, in the order of the parameters."""
        return [member.squares for member in self._members if member.squares is not None]

    def load(self, indices: Sequence[int]) -> list[Tensor]:
        """Return blocks as Newton-Schulz takes them; the first one of a parameter updates its momentum.

        A block is not held here any more. Once all of a parameter's were asked for they can be asked for again, which
        makes them anew: a step that is done by a fallback, because a kernel failed in it, does so.
        """
        places = [self._places[index] for index in indices]
        new = dict.fromkeys(number for number, _ in places if not self._members[number].looked_ahead)
        for same in _by_group_and_state(self._members[number] for number in new):
            buffers, gradients = [member.buffer for member in same], [member.piece.gradient for member in same]
            make = look_ahead if same[0].moved else momentum_updates
            aheads = make(buffers, gradients, cast(float, same[0].group["momentum"]), self._nesterov, self.gate)
            for member, ahead in zip(same, aheads, strict=True):
                member.moved, member.looked_ahead = True, dict(enumerate(_blocks(ahead, member.piece)))
        return [self._members[number].looked_ahead.pop(block) for number, block in places]

    def apply(self, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Take in what came back, and change the weights of every parameter that is complete with it."""
        complete: list[_Member] = []
        for index, result in zip(indices, results, strict=True):
            number, block = self._places[index]
            member = self._members[number]
            member.results[block] = result
            self.orthogonalized[member.piece.plan.name] += math.prod(result.shape[:-2])
            if len(member.results) == member.num_blocks:
                complete.append(member)
        for same in _by_group_and_state(complete):
            self._change(same)

    def _change(self, members: Sequence[_Member]) -> None:
        """Change the weights of members of one group."""
        weights: list[Tensor] = []
        directions: list[Tensor] = []
        scales: list[float] = []
        for member in members:
            direction, scale = self._direction(member)
            weights.append(member.piece.master)
            directions.append(direction)
            scales.append(scale)
        group = members[0].group
        lr = learning_rate(group)
        decay_rate = lr * cast(float, group["weight_decay"])
        squares = apply_changes(weights, directions, scales, lr, decay_rate, self.gate)
        for member, found in zip(members, squares, strict=True):
            member.squares = found

    def _direction(self, member: _Member) -> tuple[Tensor, float]:
        """Return what came back for a parameter in its shape, and what is to be multiplied with it."""
        parts = [member.results[block] for block in range(member.num_blocks)]
        member.results = {}
        scales = [update_scale(self._scale, *part.shape[-2:]) for part in parts]
        scale = scales[0]
        if len(set(scales)) > 1:  # blocks of different shapes have factors of their own
            parts, scale = [part * factor for part, factor in zip(parts, scales, strict=True)], 1.0
        return join_blocks(parts, member.piece.master.shape, member.piece.plan.matrix_view), scale


def _by_group_and_state(members: Iterable[_Member]) -> list[list[_Member]]:
    """Return members whose optimizer group is the same one, and of whose momenta all or none have moved."""
    found: defaultdict[tuple[int, bool], list[_Member]] = defaultdict(list)
    for member in members:
        found[id(member.group), member.moved].append(member)
    return list(found.values())


def _blocks(tensor: Tensor, piece: Piece) -> list[Tensor]:
    return matrix_blocks(tensor, piece.plan.matrix_view, piece.plan.split_rows)
